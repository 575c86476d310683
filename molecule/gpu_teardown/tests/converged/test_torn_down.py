# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Exactly what was asked for is gone, and the GPUs are free as the hypervisor's kernel sees it."""

from __future__ import annotations

import pytest
from look import Machine

testinfra_hosts = ["lab://ct101", "lab://ct102", "lab://ct103"]


@pytest.mark.parametrize("name", ["worker", "detokenizer", "stopped-worker"])
def test_the_crashed_server_is_gone(machine: Machine, name: str) -> None:
    assert machine.planted(name) is None


@pytest.mark.parametrize("name", ["neighbour", "almost", "user-of-shm"])
def test_others_live(machine: Machine, name: str) -> None:
    assert machine.planted(name)


def test_the_first_gpu_is_free_and_the_other_is_not(machine: Machine) -> None:
    first, second = machine.gpus
    assert machine.holders(first) == []
    assert machine.holders(second) == [machine.planted("neighbour")]


def test_the_unit_was_stopped_and_nobody_revived_it(machine: Machine) -> None:
    shown = machine.host.check_output("systemctl show --property=ActiveState,Result revived.service")
    assert shown == "ActiveState=inactive\nResult=success" or shown == "Result=success\nActiveState=inactive"
    assert not [process for process in machine.processes if "sglang.launch_server" in process.words]


def test_litter_of_the_dead_is_swept_from_inside_only(machine: Machine) -> None:
    left = set(machine.host.file("/dev/shm").listdir())
    assert {"sglang_loads_in_use.shm", "somebody_elses"} <= left
    dead = {"sgl_shm_mq_999999_0a1b2c3d", "sglang_loads_dead.shm"}
    # From the hypervisor a guest's files are left alone.
    assert left & dead == (dead if machine.name == "ct103" else set())
