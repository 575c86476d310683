# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What two H200s showed (driver 580.159.04, 2026-11-29), judged again: recordings of tests/gpu/run.

Each has the looks of one module: who had which nodes open and mapped, what NVML said, the verdict; of a teardown also
who was ended and who was spared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.nvml import Fault, NvmlGpu, NvmlProcess
from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.survey import Survey
from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.verdict import Limits, judge, without
from ansible_collections.cleanslate.inference.plugins.module_utils.teardown.plan import PlanOptions, make_plan

from ..proctree import ProcTree

RECORDINGS = sorted(Path(__file__).with_name("fixtures").glob("h200_*.json"))
TEARDOWNS = [path for path in RECORDINGS if path.stem.endswith("_teardown")]


def recording(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def named(path: Path) -> str:
    return path.stem[len("h200_") :]


def nvml_gpu(data: dict[str, Any]) -> NvmlGpu:
    processes = tuple(NvmlProcess(**process) for process in data["processes"])
    error = Fault(**data["error"]) if data["error"] else None
    return NvmlGpu(**{**data, "processes": processes, "error": error})


def survey_of(folder: Path, look: dict[str, Any], options: dict[str, Any]) -> Survey:
    """One recorded look at the machine, taken again."""
    gpus = look["nvml"]["gpus"]
    tree = ProcTree(folder, gpus=len(gpus), real=True)
    tree.nvml.gpus = [nvml_gpu(gpu) for gpu in gpus]
    for process in look["processes"]:
        opened = [tree.dev / name for name in process["opened"]]
        mapped = [tree.dev / name for name in process["mapped"]]
        thread = process["pid"] + 1
        made = tree.add(
            process["pid"],
            **{name: process[name] for name in "comm argv ppid pgrp session state threads start_time nspid".split()},
            flags=0x4 if process.get("exiting") else 0,
            environ={} if process["visible"] is None else {"CUDA_VISIBLE_DEVICES": process["visible"]},
            opens=[] if process["thread_only"] else opened,
            maps=mapped,
            tasks={thread: opened} if process["thread_only"] else None,
        )
        if process["thread_only"]:
            (made / "maps").rename(made / "task" / str(thread) / "maps")
    options = {name: value for name, value in options.items() if name in ("devices", "protect")}
    with tree.surveyor(**options) as surveyor:
        return surveyor.look()


@pytest.mark.parametrize("path", RECORDINGS, ids=named)
def test_the_verdict_on_each_look_is_the_one_that_was_given(path: Path, tmp_path: Path) -> None:
    data = recording(path)
    assert data["looks"]
    for number, look in enumerate(data["looks"]):
        verdict = judge(survey_of(tmp_path / str(number), look, data["options"]), Limits())
        assert (verdict.verdict, [*dict.fromkeys(reason.code for reason in verdict.reasons)]) == (
            look["verdict"],
            look["reasons"],
        )
        assert {str(gpu.gpu.index): gpu.verdict for gpu in verdict.gpus} == look["gpus"]


@pytest.mark.parametrize("path", TEARDOWNS, ids=named)
def test_the_plan_names_who_was_ended_and_who_was_spared(path: Path, tmp_path: Path) -> None:
    data = recording(path)
    plan = make_plan(survey_of(tmp_path, data["looks"][0], data["options"]), PlanOptions.from_params(data["options"]))
    assert {str(item.process.pid): item.reason for item in plan.targets} == data["killed"]
    assert {str(item.process.pid): item.reason for item in plan.spared} == data["spared"]
    assert not plan.blocked


@pytest.mark.parametrize("path", TEARDOWNS, ids=named)
def test_check_mode_would_have_predicted_what_came(path: Path, tmp_path: Path) -> None:
    data = recording(path)
    survey = survey_of(tmp_path, data["looks"][0], data["options"])
    plan = make_plan(survey, PlanOptions.from_params(data["options"]))
    predicted = judge(without(survey, {tuple(item.identity) for item in plan.targets}), Limits())
    came = path.with_name(path.name.replace("_teardown", "_free"))
    expected = recording(came)["looks"][-1] if came.exists() else {"verdict": "free", "reasons": []}
    assert predicted.verdict == expected["verdict"]
    assert [*dict.fromkeys(reason.code for reason in predicted.reasons)] == expected["reasons"]


def test_a_dying_process_is_named_until_the_driver_lets_go(tmp_path: Path) -> None:
    """100 GiB: its descriptors are gone at once, NVML lists it for another fifth of a second."""
    (path,) = [path for path in RECORDINGS if named(path) == "death-100gib_free"]
    data = recording(path)
    dying = [look for look in data["looks"] if look["processes"] and not look["processes"][0]["opened"]]
    assert dying
    for number, look in enumerate(dying):
        message = judge(survey_of(tmp_path / str(number), look, {}), Limits()).message
        assert "PID 52" in message
        assert "is ending" in message
