# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The work of MPS clients is ended through the control daemon, before they are."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.proc.table import ProcFS
from ansible_collections.cleanslate.inference.plugins.module_utils.teardown.mps import Mps, control_daemons
from ansible_collections.cleanslate.inference.plugins.module_utils.teardown.units import UnitKey

from ..proctree import ProcTree
from .fakes import TERM, Scene

PROGRAM = """#!/usr/bin/env python3
import json, os, sys
answers = json.load(open(%(answers)r))
for command in sys.stdin.read().splitlines():
    with open(%(calls)r, "a") as handle:
        handle.write(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "") + "|" + command + "\\n")
    answer = answers.get(command, "")
    if answer is None:
        sys.exit(1)
    print(answer)
"""


class Daemon:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls_file = folder / "calls"
        self.answers_file = folder / "answers"
        program = folder / "bin" / "nvidia-cuda-mps-control"
        program.parent.mkdir()
        program.write_text(
            PROGRAM % {"answers": str(self.answers_file), "calls": str(self.calls_file)}, encoding="utf-8"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", "%s:%s" % (program.parent, os.environ["PATH"]))

    def commands(self, answers: dict[str, Any]) -> None:
        self.answers_file.write_text(json.dumps(answers), encoding="utf-8")

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text(encoding="utf-8").splitlines() if self.calls_file.exists() else []


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Daemon:
    return Daemon(tmp_path, monkeypatch)


@pytest.fixture
def tree(tmp_path: Path) -> ProcTree:
    made = ProcTree(tmp_path / "machine")
    made.add(
        300,
        comm="nvidia-cuda-mps-control",
        argv=["nvidia-cuda-mps-control", "-d"],
        exe="/usr/bin/nvidia-cuda-mps-control",
        uid=os.geteuid(),
        environ={"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"},
    )
    made.add(
        301,
        comm="nvidia-cuda-mps-server",
        argv=["nvidia-cuda-mps-server"],
        exe="/usr/bin/nvidia-cuda-mps-server",
        uid=os.geteuid(),
        maps=[made.gpu(0)],
    )
    return made


def test_work_first_then_the_client(tree: ProcTree, daemon: Daemon) -> None:
    daemon.commands({"get_server_list": "301", "get_client_list 301": "500\n600\n0\n-1\nnonsense"})
    tree.add(500, argv=["sglang::scheduler"], maps=[tree.gpu(0)])
    tree.add(600, comm="other", argv=["other"], maps=[tree.gpu(0)])
    scene = Scene(tree)
    order: list[str] = []
    scene.kernel.before_signal = lambda pid, number: order.extend(daemon.calls)
    outcome = scene.end()
    assert scene.kernel.sent == [(0.0, 500, TERM)]
    assert order == [
        "/run/mps|get_server_list",
        "/run/mps|get_client_list 301",
        "/run/mps|terminate_client 301 500",
    ]
    assert outcome.warnings == []


def test_the_daemon_and_its_server_are_spared(tree: ProcTree, daemon: Daemon) -> None:
    daemon.commands({})
    tree.add(500, argv=["trainer"], comm="trainer", maps=[tree.gpu(0)])
    scene = Scene(tree)
    scene.end(scope="all")
    assert scene.kernel.signalled == {500}


def test_a_refusal_is_told_and_the_client_is_ended(tree: ProcTree, daemon: Daemon) -> None:
    daemon.commands({"get_server_list": "301", "get_client_list 301": "500", "terminate_client 301 500": None})
    tree.add(500, argv=["sglang::scheduler"], maps=[tree.gpu(0)])
    scene = Scene(tree)
    outcome = scene.end()
    assert scene.kernel.signalled == {500}
    assert "client 500" in outcome.warnings[0]


def test_a_strangers_daemon_is_not_talked_to(tree: ProcTree, daemon: Daemon) -> None:
    tree.add(
        310,
        comm="nvidia-cuda-mps-control",
        argv=["nvidia-cuda-mps-control"],
        exe="/home/eve/nvidia-cuda-mps-control",
        uid=os.geteuid() + 4000,
    )
    found = control_daemons(ProcFS(str(tree.proc)).processes().values())
    assert [daemon.process.pid for daemon in found] == [300]


def test_without_the_program_there_is_no_answer(
    tree: ProcTree, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    (found,) = control_daemons(ProcFS(str(tree.proc)).processes().values())
    assert Mps().terminate(found, {500}) == []


def test_work_comes_before_the_stop_of_the_clients_unit(tree: ProcTree, daemon: Daemon) -> None:
    daemon.commands({"get_server_list": "301", "get_client_list 301": "500"})
    tree.add(500, argv=["sglang::scheduler"], maps=[tree.gpu(0)], cgroup="/system.slice/llm.service")
    scene = Scene(tree)
    scene.systemd.unit("llm.service", [500], main_pid=500, cgroup="/system.slice/llm.service")
    told: list[int] = []
    stop = scene.systemd.stop

    def stopping(key: UnitKey) -> Any:
        told.append(len(daemon.calls))
        return stop(key)

    scene.systemd.stop = stopping  # type: ignore[method-assign]
    outcome = scene.end()
    assert outcome.stopped_units == ["llm.service"]
    assert told == [3], "the unit was stopped before its client's work was ended"


def test_a_guests_daemon_is_asked_in_the_guest_about_the_guests_pids(
    tree: ProcTree, daemon: Daemon, tmp_path: Path
) -> None:
    pct = tmp_path / "bin" / "pct"
    pct.write_text(
        '#!/bin/sh\necho "$2" >>%s/entered\nwhile [ "$1" != -- ]; do shift; done; shift; exec "$@"\n' % tmp_path,
        encoding="utf-8",
    )
    pct.chmod(0o755)
    daemon.commands({"get_server_list": "31", "get_client_list 31": "50\n60"})
    guest = {"uid": 100000}
    for pid, inside, more in (
        (50001, 1, {"comm": "systemd", "argv": ["/sbin/init"]}),
        (
            50030,
            30,
            {
                "comm": "nvidia-cuda-mps-control",
                "argv": ["nvidia-cuda-mps-control", "-d"],
                "exe": "/usr/bin/nvidia-cuda-mps-control",
                "environ": {"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"},
            },
        ),
        (50050, 50, {"argv": ["sglang::scheduler"], "maps": [tree.gpu(1)]}),
    ):
        tree.add(pid, cgroup="/lxc/129/ns/x", nspid=[pid, inside], **guest, **more)
    outcome = Scene(tree, containers=["129"]).end()
    assert [row["pid"] for row in outcome.killed] == [50050]
    # Ours, outside, knows none of them; the guest's is told by its own pids.
    assert "/run/mps|terminate_client 31 50" in daemon.calls
    assert (tmp_path / "entered").read_text(encoding="utf-8").splitlines() == ["129"] * 3
