# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the task files decide by expressions, and that a run always ends with its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

ROOT = Path(__file__).resolve().parents[3]
ROW = {"pid": 5, "start_time": 7, "decision": "target"}


def tasks(path: str) -> list[dict[str, Any]]:
    return DataLoader().load_from_file(str(ROOT / path), trusted_as_template=True)


def within(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All tasks, those of blocks too."""
    parts = ("block", "rescue", "always")
    return [one for task in found for one in (task, *within([x for part in parts for x in task.get(part, [])]))]


def templar(task: dict[str, Any], **variables: Any) -> Templar:
    return Templar(DataLoader(), {**task.get("vars", {}), "omit": "omitted", **variables})


@pytest.mark.parametrize(
    ("killed", "check", "assumed"),
    [
        # A task can be in check mode in a run that is not: the plan that teardown.yml shows before it is confirmed.
        ([ROW], False, [ROW]),
        ([ROW], True, [ROW]),
        ([], True, []),
        ([dict(ROW, decision="ended")], False, "omitted"),
    ],
)
def test_the_proof_goes_by_the_plan_where_nothing_was_ended(killed: list, check: bool, assumed: object) -> None:
    task = tasks("roles/gpu_teardown/tasks/prove.yml")[0]
    found = templar(task, __gpu_teardown_result={"killed": killed}, ansible_check_mode=check)
    assert found.template(task["cleanslate.inference.gpu_free"]["assume_ended"]) == assumed


@pytest.mark.parametrize(
    ("variables", "dropped"),
    [
        ({"__sglang_server_plan": {"converged": False}}, True),
        ({"__sglang_server_plan": {"converged": False}, "__sglang_server_proof": {"proven": True}}, False),
        ({"__sglang_server_plan": {"converged": True}}, True),
        ({"__sglang_server_plan": {"converged": True}, "__sglang_server_proof": {"skipped": True}}, True),
        ({}, False),
        ({"__sglang_server_plan": {"converged": False}, "ansible_check_mode": True}, False),
    ],
)
def test_the_lease_is_dropped_where_tags_leave_the_proof_out(variables: dict[str, Any], dropped: bool) -> None:
    task = next(task for task in tasks("roles/sglang_server/tasks/main.yml") if "cleanslate.inference.lease" in task)
    found = templar(task, **{"ansible_check_mode": False, "sglang_server_lease": "run-1", **variables})
    assert all(found.evaluate_conditional(condition) for condition in task["when"]) == dropped
    assert "plan" in task["tags"]


RUN = """
- hosts: all
  gather_facts: false
  vars:
    cleanslate_run: run-1
    cleanslate_run_dir: {run_dir}
  tasks:
    - block:
        - ansible.builtin.set_fact:
            __gpu_node_info: {{changed: false}}
        - ansible.builtin.fail:
            msg: something is wrong here
      rescue:
        - ansible.builtin.include_tasks: {root}/playbooks/tasks/give_up.yml
    - cleanslate.inference.report:
        title: Test
        path: {report}
      run_once: true
"""


def test_a_lease_that_cannot_be_dropped_leaves_the_report(tmp_path: Path) -> None:
    run_dir, report, play = tmp_path / "run", tmp_path / "report.json", tmp_path / "play.yml"
    run_dir.mkdir()
    (run_dir / "lease.json").write_text("damaged")
    play.write_text(RUN.format(run_dir=run_dir, root=ROOT, report=report))
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
    done = subprocess.run(
        [sys.executable, "-m", "ansible.cli.playbook", "-i", "localhost,", "-c", "local", str(play)]
        + ["-e", json.dumps({"ansible_python_interpreter": sys.executable})],
        env=dict(kept, ANSIBLE_COLLECTIONS_PATH=str(ROOT / ".collections"), ANSIBLE_HOME=str(tmp_path / "home")),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stdout + done.stderr
    row = json.loads(report.read_text())["nodes"][0]
    assert (row["outcome"], row["reason"]) == ("failed", "something is wrong here")


@pytest.mark.parametrize("play", sorted(path.name for path in (ROOT / "playbooks").glob("*.yml")))
def test_a_failure_is_told_whatever_tags_were_asked_for(play: str) -> None:
    """Tags choose among the tasks of a rescue too: without C(always) there is none, and no report follows."""
    blocks = [task for task in tasks(f"playbooks/{play}")[0]["tasks"] if "rescue" in task]
    for task in [task for block in blocks for task in block["rescue"]]:
        assert task["tags"] == ["always"]
        assert task["ansible.builtin.include_tasks"]["apply"] == {"tags": ["always"]}


def test_the_operators_own_tasks_run_with_the_step_they_belong_to() -> None:
    """Their files know nothing of our tags."""
    own = [task for task in within(tasks("roles/sglang_server/tasks/instance.yml")) if "loop" in task]
    assert len(own) == 2
    for task in own:
        assert task["ansible.builtin.include_tasks"]["apply"]["tags"] == task["tags"]
