# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The trials on real GPUs (tests/gpu), on stand-in ones: who is refused, what is called, what is told."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.gpu import survey as survey_module
from ansible_collections.cleanslate.inference.plugins.modules import gpu_free, gpu_info, gpu_teardown, runtime_residue

from ..proctree import ProcTree

ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "tests/gpu"))

from kit import main, meter, ours, report, states  # noqa: E402

MODULES = {
    "gpu_free": gpu_free,
    "gpu_info": gpu_info,
    "gpu_teardown": gpu_teardown,
    "runtime_residue": runtime_residue,
}


@pytest.fixture
def clean_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


class QuietMeter:
    """An observer that sees what the test says."""

    def __init__(self, used: tuple[int, ...] = (0, 0), listed: tuple[tuple[int, int], ...] = ()) -> None:
        self.used = used
        self.listed = list(listed)

    def memory(self) -> tuple[int, ...]:
        return self.used

    def processes(self) -> list[tuple[int, int]]:
        return self.listed

    def wait_idle(self, seconds: float) -> bool:
        return all(used <= meter.IDLE for used in self.used)


@pytest.mark.parametrize("name", MODULES)
def test_the_modules_are_called_with_their_own_defaults(name: str) -> None:
    spec = importlib.import_module(MODULES[name].__name__).ARGUMENT_SPEC
    assert ours.DEFAULTS[name] == {option: details.get("default") for option, details in spec.items()}


def test_a_machine_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clean_path: None) -> None:
    tree = ProcTree(tmp_path, gpus=2)

    def look(options: Any) -> Any:
        with tree.surveyor() as surveyor:
            return surveyor.look()

    monkeypatch.setattr(survey_module, "take_survey", look)
    main.check_machine(QuietMeter(), str(tree.dev), True)
    with pytest.raises(main.Refused, match="NVML lists process 77"):
        main.check_machine(QuietMeter(listed=((0, 77),)), str(tree.dev), True)
    with pytest.raises(main.Refused, match="0, 700 MiB"):
        main.check_machine(QuietMeter(used=(0, 700 * meter.MIB)), str(tree.dev), True)
    tree.nvml.set(1, mig=())
    with pytest.raises(main.Refused, match="GPU 1 is in MIG mode"):
        main.check_machine(QuietMeter(), str(tree.dev), True)
    tree.add(471, argv=["python3", "train.py"], opens=[tree.gpu(1)], maps=[tree.gpu(1)])
    with pytest.raises(main.Refused, match=r"PID 471 .*train\.py"):
        main.check_machine(QuietMeter(), str(tree.dev), True)


def test_the_memory_is_back_with_the_first_idle_answer_after_the_signal() -> None:
    seen = object.__new__(meter.Meter)
    seen.times = [1.0, 2.0, 3.0, 4.0, 5.0]
    seen.used = [(0,), (9 * meter.IDLE,), (9 * meter.IDLE,), (meter.IDLE,), (0,)]
    assert seen.back(0, 1.5) == 4.0
    assert seen.back(0, 6.0) is None
    assert seen.at(2.5) == (9 * meter.IDLE,)
    assert seen.at(9.0) == (0,)


def trial(**changes: Any) -> dict[str, Any]:
    right = {"state": "plain", "method": "modules", "wall": 0.5, "verdict": "free", "right": True, "said": ""}
    return {**right, "wrongly_killed": [], "left_over": [], **changes}


def death(late: float) -> dict[str, Any]:
    looks = [(0.0, 0.1, "busy"), (0.2, 0.22, "busy"), (0.3, 0.32, "free")]
    return {
        "mib": 4096,
        "signalled": 1.0,
        "ended": 1.1,
        "back": 1.05,
        "finished": 1.1 + late,
        "verdict": "free",
        "looks": looks,
        "msg": "",
    }


@pytest.mark.parametrize(
    ("changes", "complaints"),
    [
        ({}, 0),
        ({"wrongly_killed": ["colleague"]}, 1),
        ({"left_over": ["job"]}, 1),
        ({"right": False}, 1),
        ({"verdict": "not free"}, 1),
        ({"state": "protected", "verdict": "not free"}, 0),
        ({"state": "protected"}, 1),
        ({"method": "shell", "right": False, "left_over": ["job"]}, 0),
    ],
)
def test_only_what_the_modules_promise_is_a_failure(changes: dict[str, Any], complaints: int) -> None:
    results = {"trials": [trial(**changes)], "deaths": [], "simulated": False}
    assert len(report.failures(results)) == complaints


@pytest.mark.parametrize(("late", "complaints"), [(0.08, 0), (0.1, 1)])
def test_a_late_verdict_is_a_failure_on_real_gpus_alone(late: float, complaints: int) -> None:
    results = {"trials": [], "deaths": [death(late)], "simulated": False}
    assert len(report.failures(results)) == complaints
    assert report.failures({**results, "simulated": True}) == []


def test_an_unknown_state_is_an_error() -> None:
    assert [state.name for state in states.named("heir,plain")] == ["heir", "plain"]
    assert len(states.named("")) == len(states.STATES)
    with pytest.raises(KeyError):
        states.named("nosuch")


def test_the_whole_of_it_on_stand_in_gpus(tmp_path: Path) -> None:
    """One state that tools get wrong: a server on GPU 0 crashed, another one on GPU 1 has all nodes open."""
    command = [sys.executable, str(ROOT / "tests/gpu/run"), "--simulate", "--states", "neighbour", "--rounds", "1"]
    command += ["--deaths", "1", "--methods", "modules,shell", "--out", str(tmp_path)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("CUDA_", "FAKE_"))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    mine, shell = results["trials"]
    assert (mine["method"], mine["verdict"], mine["right"]) == ("modules", "free", True)
    assert (mine["wrongly_killed"], mine["left_over"]) == ([], [])
    assert {row["comm"] for row in mine["teardown"]["killed"]} == {"sglang::schedul", "sglang::detoken"}
    assert {row["reason"] for row in mine["teardown"]["spared"]} == {"neighbour"}
    assert shell["method"] == "shell"
    assert "a module of another play" in shell["wrongly_killed"]
    assert results["deaths"][0]["verdict"] == "free"
    assert results["simulated"] is True
    assert "(simulated)" in (tmp_path / "results.md").read_text()
    looks = json.loads((tmp_path / "recordings/neighbour.gpu_teardown.json").read_text())["looks"]
    assert looks[0]["verdict"] == "busy"
