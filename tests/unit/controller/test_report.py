# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The final table: which outcome follows from which results, and the exit code that follows from it."""

from __future__ import annotations

import pytest

from ansible_collections.cleanslate.inference.plugins.plugin_utils.report import GOOD, STEPS, cells, node_rows

LOOK = {"gpus": [{"verdict": "free"}] * 8}
PLAN = {
    "converged": False,
    "verdict": "reset",
    "reasons": [{"code": "x", "msg": "a worker is dead"}],
    "instance": "main",
}
TEARDOWN = {"killed": [{"pid": 5}, {"pid": 6}], "stopped_units": ["a.service"], "elapsed": 1.25, "changed": True}
FREE = {"verdict": "free", "gpus": [{"verdict": "free"}] * 4, "waited": 0.5, "msg": "4 GPUs are free"}
RESIDUE = {"removed": [], "changed": False}
LAUNCH, READY, PROOF = {"changed": True}, {"ready": True, "elapsed": 3.0}, {"msg": "proven"}
ALL = [LOOK, PLAN, TEARDOWN, FREE, RESIDUE, LAUNCH, READY, PROOF]
LOST = {"unreachable": True, "msg": "Connection timed out"}


def only(*arguments: object, **options: object) -> dict:
    (found,) = node_rows(*arguments, **options)  # type: ignore[arg-type]
    return found


def row(*results: dict, failure: dict | None = None, check: bool = False) -> dict:
    variables = {variable: result for (_step, variable), result in zip(STEPS, results, strict=False) if result}
    if failure:
        variables["__cleanslate_failure"] = failure
    (found,) = node_rows("node1", variables, check)
    return found


def test_a_whole_run_serves_and_adds_up() -> None:
    found = row(*ALL)
    assert (found["outcome"], found["ok"], found["instance"]) == ("serving", True, "main")
    assert found["gpus"] == {"free": 4, "busy": 0, "unknown": 0, "total": 4}
    assert found["seconds"] == pytest.approx(4.8, abs=0.06)
    assert cells(found)[4] == "3"


@pytest.mark.parametrize("lost_at", range(len(STEPS)))
def test_a_node_that_is_lost_at_any_step_is_unreachable(lost_at: int) -> None:
    results = [*ALL[:lost_at], LOST, *ALL[lost_at + 1 :]]
    found = row(*results)
    assert (found["outcome"], found["step"], found["ok"]) == ("unreachable", STEPS[lost_at][0], False)
    assert "timed out" in found["reason"]


@pytest.mark.parametrize("failed_at", range(len(STEPS)))
def test_a_step_that_failed_is_named_with_its_reason(failed_at: int) -> None:
    found = row(*ALL[:failed_at], {"failed": True, "msg": "because"})
    assert (found["outcome"], found["step"], found["reason"], found["ok"]) == (
        "failed",
        STEPS[failed_at][0],
        "because",
        False,
    )


@pytest.mark.parametrize("ended_after", range(1, len(STEPS) - 1))
def test_a_play_that_stopped_half_way_is_never_good(ended_after: int) -> None:
    assert not row(*ALL[: ended_after + 1])["ok"] or STEPS[ended_after][0] == "prove server"


def test_a_blocked_plan_is_told_apart_from_a_failed_one() -> None:
    blocked = row(LOOK, dict(PLAN, failed=True, verdict="blocked", msg="GPU 7 is somebody else's"))
    assert (blocked["outcome"], blocked["ok"]) == ("blocked", False)


def test_nothing_ran_is_not_good() -> None:
    assert row()["outcome"] == "not run"
    assert not row()["ok"]


def test_a_failure_without_a_result_of_its_own_is_not_lost() -> None:
    found = row(LOOK, failure={"task": "Check the declaration", "msg": "sglang_server_port is no number"})
    assert (found["outcome"], found["step"], found["ok"]) == ("failed", "Check the declaration", False)


def test_converged_and_check_mode() -> None:
    assert row(LOOK, dict(PLAN, converged=True), {}, {}, {}, {}, {}, PROOF)["outcome"] == "converged"
    assert row(LOOK, PLAN, TEARDOWN, FREE, check=True)["outcome"] == "would launch"


@pytest.mark.parametrize(
    ("free", "check", "outcome"),
    [
        ({"verdict": "free"}, False, "free"),
        ({"verdict": "busy"}, False, "failed"),
        ({"verdict": "unknown"}, False, "failed"),
        ({"verdict": "busy", "predicted_verdict": "free"}, True, "would free"),
        ({"verdict": "busy", "predicted_verdict": "busy"}, True, "failed"),
        ({"verdict": "busy", "predicted_verdict": "free"}, False, "failed"),
    ],
)
def test_teardown_alone_is_judged_by_the_proof(free: dict, check: bool, outcome: str) -> None:
    found = row(LOOK, {}, TEARDOWN, free, check=check)
    assert found["outcome"] == outcome
    assert found["ok"] == (outcome in GOOD)


def test_simulated_is_said_in_every_row() -> None:
    assert "simulated" in cells(row(LOOK, {}, TEARDOWN, dict(FREE, simulated=True)))[-1]


def test_who_asks_for_some_steps_gets_them() -> None:
    """C(--tags plan) ends after the plan, and that is no failure; a step that failed still is one."""
    asked = {variable: result for (_step, variable), result in zip(STEPS[:2], [LOOK, PLAN], strict=True)}
    found = only("node1", asked, partly=True)
    assert (found["outcome"], found["ok"]) == ("partly done", True)
    assert "'plan'" in found["reason"]
    assert not only("node1", {}, partly=True)["ok"]
    assert not only("node1", dict(asked, __cleanslate_failure={"msg": "no"}), partly=True)["ok"]
    assert not only("node1", dict(asked, __sglang_server_plan=dict(PLAN, failed=True)), partly=True)["ok"]


# -- several servers on a node -------------------------------------------------------------------------------------

DONE = {"plan": PLAN, "teardown": TEARDOWN, "free": FREE, "launch": LAUNCH, "ready": READY, "proof": PROOF}
CONVERGED = {"plan": dict(PLAN, converged=True), "proof": PROOF}


def servers(failure: dict | None = None, **results: dict) -> list[tuple[str, str, int]]:
    variables = {"__gpu_node_info": LOOK, "__sglang_server_results": results}
    # What was registered last is of one of them, and must not be taken for another's.
    variables.update(__gpu_teardown_result=TEARDOWN, __sglang_server_plan=dict(PLAN, converged=True))
    if failure:
        variables["__cleanslate_failure"] = failure
    return [(found["instance"], found["outcome"], len(found["ended"])) for found in node_rows("node1", variables)]


def test_each_server_has_its_own_row_and_its_own_dead() -> None:
    assert servers(a=DONE, b=CONVERGED) == [("a", "serving", 2), ("b", "converged", 0)]


def test_a_server_that_failed_does_not_blame_the_others() -> None:
    failed = dict(DONE, ready={"failed": True, "msg": "out of memory"}, proof={})
    assert servers({"msg": "out of memory"}, a=CONVERGED, b=failed, c={"plan": PLAN}) == [
        ("a", "converged", 0),
        ("b", "failed", 2),
        ("c", "not run", 0),
    ]


def test_a_failure_without_a_result_goes_to_the_server_that_was_not_finished() -> None:
    assert servers({"msg": "no template"}, a=DONE, b={"plan": PLAN}) == [("a", "serving", 2), ("b", "failed", 0)]
    assert servers({"msg": "no hook"}, a=CONVERGED, b=DONE) == [("a", "converged", 0), ("b", "failed", 2)]
