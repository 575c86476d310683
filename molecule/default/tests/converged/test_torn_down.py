# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The defaults: what is left of SGLang goes, on every GPU; nobody else does."""

from __future__ import annotations

from look import Machine

testinfra_hosts = ["lab://gpu_nodes"]


def test_only_sglang_is_gone(machine: Machine) -> None:
    assert machine.planted("worker") is None
    assert machine.planted("stranger")


def test_the_gpus_are_free(machine: Machine) -> None:
    assert [machine.holders(gpu) for gpu in machine.gpus] == [[]] * len(machine.gpus)
