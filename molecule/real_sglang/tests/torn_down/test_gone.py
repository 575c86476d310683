# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Nothing of the real SGLang is left."""

from __future__ import annotations

from look import Machine
from testinfra.host import Host

testinfra_hosts = ["lab://lab_sglang"]


def test_no_process_is_left(host: Host, machine: Machine) -> None:
    assert machine.instance("main") == []
    assert not host.service("cleanslate-main").is_running


def test_the_gpu_is_free(machine: Machine) -> None:
    assert machine.holders(machine.gpus[0]) == []
