# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Role sglang_server with two servers on a node: its real tasks, and modules that only write down the question."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
MODULES = (
    "server_plan",
    "gpu_teardown",
    "gpu_free",
    "runtime_residue",
    "server_launch",
    "server_ready",
    "server_proof",
    "lease",
)
#: Says what it was asked, and answers as the scenario has it: MODULE, or MODULE of an instance.
STUB = """#!/usr/bin/python
# WANT_JSON
import json, sys
name = %r
folder = %r
with open(sys.argv[1]) as handle:
    asked = json.load(handle)
who = asked.get("instance") or ",".join(asked.get("instances") or [])
with open(folder + "/asked", "a") as log:
    log.write(json.dumps([name, who, asked]) + "\\n")
with open(folder + "/answers.json") as handle:
    answers = json.load(handle)
print(json.dumps(dict({"changed": False, "by": name}, **answers.get(name + " " + who, answers.get(name, {})))))
"""
PLAY = """
- hosts: all
  gather_facts: false
  vars:
    cleanslate_run: run-1
    sglang_server_model_path: /srv/m
    sglang_server_instances:
      - {name: a, gpus: [0]}
      - {name: b, gpus: [1], port: 30001, stop_timeout: 5}
    sglang_server_after_ready_tasks: [FOLDER/after.yml]
  tasks:
    - block:
        - ansible.builtin.import_role:
            name: cleanslate.inference.sglang_server
      always:
        - ansible.builtin.copy:
            content: "{{ __sglang_server_results | to_json }}"
            dest: FOLDER/results.json
            mode: "0600"
"""
AFTER = """
- cleanslate.inference.lease:
    instance: "after {{ __sglang_server_instance.name }}"
"""
TARGET = {"pid": 5, "start_time": 7, "decision": "target"}
RESET = {
    "converged": False,
    "verdict": "reset",
    "teardown": {"targets": [TARGET]},
    "devices": ["GPU-0"],
    "ports": [30000],
}
CONVERGED = {"converged": True, "verdict": "converged", "teardown": {"targets": []}, "devices": [], "ports": []}
WHOLE = ["free", "launch", "plan", "proof", "ready", "residue", "teardown"]


class Run:
    def __init__(self, folder: Path, answers: dict[str, Any]) -> None:
        where = folder / "collections/ansible_collections/cleanslate/inference"
        (where / "plugins/modules").mkdir(parents=True)
        for name in ("roles", "meta", "plugins/filter", "plugins/lookup", "plugins/module_utils"):
            (where / name).symlink_to(ROOT / name)
        for name in MODULES:
            (where / "plugins/modules" / f"{name}.py").write_text(STUB % (name, str(folder)))
        (folder / "answers.json").write_text(json.dumps(answers))
        (folder / "after.yml").write_text(AFTER)
        (folder / "play.yml").write_text(PLAY.replace("FOLDER", str(folder)))
        kept = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
        done = subprocess.run(
            [sys.executable, "-m", "ansible.cli.playbook", "-i", "localhost,", "-c", "local", str(folder / "play.yml")]
            + ["-e", json.dumps({"ansible_python_interpreter": sys.executable})],
            env=dict(kept, ANSIBLE_COLLECTIONS_PATH=str(folder / "collections"), ANSIBLE_HOME=str(folder / "home")),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        self.code, self.output = done.returncode, done.stdout + done.stderr
        self.asked = [json.loads(line) for line in (folder / "asked").read_text().splitlines()]
        self.steps = [f"{name} {who}".strip() for name, who, _options in self.asked]
        self.results = json.loads((folder / "results.json").read_text())

    def options(self, step: str) -> dict[str, Any]:
        return next(options for name, who, options in self.asked if f"{name} {who}" == step)


def test_a_wrong_declaration_of_the_last_costs_the_first_nothing(tmp_path: Path) -> None:
    blocked = {"failed": True, "verdict": "blocked", "msg": "b cannot be brought up"}
    run = Run(tmp_path, {"server_plan a": RESET, "server_plan b": blocked})
    assert run.code == 2, run.output
    assert run.steps == ["server_plan a", "server_plan b"]
    assert run.results["a"]["plan"]["verdict"] == "reset"
    assert run.results["b"]["plan"]["msg"] == "b cannot be brought up"


def test_each_server_keeps_its_own_results(tmp_path: Path) -> None:
    run = Run(tmp_path, {"server_plan a": RESET, "server_plan b": CONVERGED})
    assert run.code == 0, run.output
    first = ["gpu_teardown a", "gpu_free", "runtime_residue", "server_launch a", "server_ready a", "server_proof a"]
    # The converged one is only proven; what is to be done with a ready server is done for both.
    assert run.steps == [
        *("server_plan a", "server_plan b"),
        *first,
        *("lease after a", "server_proof b", "lease after b"),
    ]
    assert sorted(run.results["a"]) == WHOLE
    assert sorted(run.results["b"]) == ["plan", "proof"]
    # What the first gives up does not stand in the second's way.
    assert [run.options(f"server_plan {name}")["assume_ended"] for name in "ab"] == [[], [TARGET]]
    # The node is this run's until its last step.
    assert [run.options(f"server_proof {name}")["release_lease"] for name in "ab"] == [False, True]
    assert not any(options.get("release_lease") for name, _who, options in run.asked if name == "server_plan")
    assert [run.options("gpu_teardown a")[key] for key in ("term_timeout", "kill_timeout")] == [30, 90]


@pytest.mark.parametrize(
    ("step", "kept"),
    [
        ("gpu_teardown b", ["plan", "teardown"]),
        ("server_launch b", ["free", "launch", "plan", "residue", "teardown"]),
        ("server_proof b", WHOLE),
    ],
)
def test_a_server_that_fails_keeps_what_was_reached(tmp_path: Path, step: str, kept: list[str]) -> None:
    run = Run(tmp_path, {"server_plan": RESET, step: {"failed": True, "msg": "no"}})
    assert run.code == 2, run.output
    assert sorted(run.results["a"]) == WHOLE
    assert sorted(run.results["b"]) == kept
    assert run.steps[-1] == step
    assert run.options("gpu_teardown b")["term_timeout"] == 5
