# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every node serves as declared again, whatever had become of it."""

from __future__ import annotations

import json

from look import Machine, get, report
from testinfra.host import Host

testinfra_hosts = ["lab://gpu_nodes"]


def test_unit_and_generation(host: Host) -> None:
    assert host.service("cleanslate-main").is_running
    status, body = get(host, 30000, "/generate", {"text": "Hello", "sampling_params": {"max_new_tokens": 8}})
    assert (status, json.loads(body)["meta_info"]["completion_tokens"]) == (200, 8)


def test_workers_have_the_variables(machine: Machine) -> None:
    workers = [process for process in machine.instance("main") if process.title.startswith("sglang::")]
    assert len(workers) == 2
    for worker in workers:
        assert worker.environment["NCCL_ALGO"] == "allreduce:ring,tree"
        assert worker.environment["NCCL_PROTO"] == "Simple"


def test_its_gpu_is_its_own(machine: Machine) -> None:
    own = {process.pid for process in machine.instance("main")}
    using = [process for process in machine.holders(machine.gpus[0]) if process.uses(machine.gpus[0], machine.gpus)]
    assert using
    assert {process.pid for process in using} <= own


def test_orphans_are_gone_and_the_neighbour_lives(machine: Machine) -> None:
    assert (machine.planted("orphan"), machine.planted("listener")) == (None, None)
    assert bool(machine.planted("neighbour")) == (machine.name == "ct101")


def test_the_last_run_found_nothing_to_do(machine: Machine) -> None:
    row = report(machine.name)
    assert (row["outcome"], row["changed"], row["ended"]) == ("converged", False, [])
