# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the role saw is what the hypervisor's kernel shows."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from look import Machine
from testinfra.host import Host

testinfra_hosts = ["lab://gpu_nodes", "lab://px1"]


@pytest.fixture
def seen(machine: Machine) -> dict:
    return json.loads(Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"], f"seen-{machine.name}.json").read_text())


def test_the_binding_is_placed_again(host: Host) -> None:
    assert host.file("/var/lib/cleanslate/lib/pynvml.py").mode == 0o644
    assert host.file("/var/lib/cleanslate/lib").mode == 0o755


def test_gpus(machine: Machine, seen: dict) -> None:
    assert [gpu["minor"] for gpu in seen["gpus"]] == list(machine.gpus)
    assert [gpu["index"] for gpu in seen["gpus"]] == list(range(len(machine.gpus)))
    assert seen["simulated"] is False


def test_holders(machine: Machine, seen: dict) -> None:
    expected = {}
    for gpu in machine.gpus:
        for process in machine.holders(gpu):
            expected[process.pid if machine.guest is None else process.inner_pid] = process
    rows = {row["pid"]: row for row in seen["holders"]}
    assert set(rows) == set(expected)
    for pid, process in expected.items():
        assert rows[pid]["guest_pid"] == process.inner_pid
        assert rows[pid]["start_time"] == process.start_time
        container = process.cgroup.split("/lxc/")[1].split("/")[0]
        assert rows[pid]["container"] == ("" if machine.guest else f"lxc/{container}")


def test_nothing_secret_was_told(seen: dict) -> None:
    assert "token-of-molecule" not in json.dumps(seen)
