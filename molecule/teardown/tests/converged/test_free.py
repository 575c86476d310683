# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every node's first GPU is free, its server is stopped for good, and the neighbour trains on."""

from __future__ import annotations

from look import Machine, report
from testinfra.host import Host

testinfra_hosts = ["lab://gpu_nodes"]


def test_the_server_is_gone(host: Host, machine: Machine) -> None:
    assert machine.instance("main") == []
    assert host.check_output("systemctl show --property=ActiveState --value cleanslate-main") == "inactive"


def test_the_gpu_is_free(machine: Machine) -> None:
    # The neighbour has the node open, as SGLang has those of its neighbours; it uses the other one.
    users = [process for process in machine.holders(machine.gpus[0]) if process.uses(machine.gpus[0], machine.gpus)]
    assert users == []


def test_the_neighbour_lives(machine: Machine) -> None:
    assert machine.planted("neighbour")


def test_nothing_is_left_in_shared_memory(host: Host) -> None:
    left = host.file("/dev/shm").listdir()
    assert [name for name in left if name.startswith(("sgl", "nccl-", "torch_"))] == []


def test_the_report(machine: Machine) -> None:
    row = report(machine.name)
    assert (row["outcome"], row["changed"]) == ("free", False)
