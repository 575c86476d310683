# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The outsider's server serves."""

from __future__ import annotations

from look import Machine, get
from testinfra.host import Host

testinfra_hosts = ["lab://ct101"]


def test_serves(host: Host, machine: Machine) -> None:
    assert host.service("cleanslate-chat").is_running
    assert get(host, 31000, "/model_info")[0] == 200
    assert {process.pid for process in machine.holders(machine.gpus[0])} <= {p.pid for p in machine.instance("chat")}
