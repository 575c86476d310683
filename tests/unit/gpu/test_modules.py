# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The modules themselves, on a fixture tree: parameters in, JSON and exit code out."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.errors import AnsibleLookupError
from ansible.module_utils import basic

from ansible_collections.cleanslate.inference.plugins.lookup import pynvml as lookup
from ansible_collections.cleanslate.inference.plugins.module_utils.gpu import survey
from ansible_collections.cleanslate.inference.plugins.module_utils.proc.table import ProcFS
from ansible_collections.cleanslate.inference.plugins.module_utils.state.lease import Lease

from ..proctree import ProcTree

Run = Callable[..., dict[str, Any]]
PLUGINS = "ansible_collections.cleanslate.inference.plugins"


@pytest.fixture
def tree(tmp_path: Path) -> ProcTree:
    return ProcTree(tmp_path, gpus=2)


@pytest.fixture
def run(tree: ProcTree, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a module on the tree; returns its result, with rc."""
    monkeypatch.setattr(survey, "ProcFS", lambda: ProcFS(str(tree.proc)))
    monkeypatch.setattr(survey, "NvmlSession", lambda path, timeout: tree.nvml)

    def run(name: str, check_mode: bool = False, **params: Any) -> dict[str, Any]:
        if name != "lease":
            params = {"dev_dir": str(tree.dev), "state_dir": str(tree.state), **params}
        arguments = {"ANSIBLE_MODULE_ARGS": {**params, "_ansible_check_mode": check_mode}}
        monkeypatch.setattr(basic, "_ANSIBLE_ARGS", json.dumps(arguments).encode())
        monkeypatch.setattr(basic, "_ANSIBLE_PROFILE", "legacy")
        module = importlib.import_module("%s.modules.%s" % (PLUGINS, name))
        with pytest.raises(SystemExit) as ended:
            module.main()
        return {**json.loads(capsys.readouterr().out), "rc": ended.value.code}

    return run


def test_gpu_free_passes_on_free_gpus_and_changes_nothing(run: Run, tree: ProcTree) -> None:
    result = run("gpu_free", interval=0.001)
    assert (result["rc"], result["free"], result["changed"]) == (0, True, False)
    assert set(result) >= set(
        "free verdict reasons notes gpus holders benign_holders nvml_processes scan waited msg simulated".split()
    )
    assert tree.nvml.closed


def test_gpu_free_fails_with_the_whole_result(run: Run, tree: ProcTree) -> None:
    tree.add(7, opens=[tree.gpu(0)])
    result = run("gpu_free", timeout=0)
    assert (result["rc"], result["failed"], result["verdict"]) == (1, True, "busy")
    assert result["holders"][0]["pid"] == 7
    assert "PID 7" in result["msg"]


def test_gpu_free_in_check_mode_is_decided_by_the_prediction(run: Run, tree: ProcTree) -> None:
    tree.add(7, opens=[tree.gpu(0)], maps=[tree.gpu(0)])
    tree.nvml.set(0, used=1000, processes=[(7, 990)])
    ended = [{"pid": 7, "start_time": 1007, "comm": "python3"}]
    result = run("gpu_free", check_mode=True, assume_ended=ended, timeout=0)
    assert (result["rc"], result["verdict"], result["predicted_verdict"]) == (0, "busy", "free")
    result = run("gpu_free", check_mode=True, assume_ended=[], timeout=0)
    assert (result["rc"], result["predicted_verdict"]) == (1, "busy")
    result = run("gpu_free", assume_ended=ended)
    assert result["failed"]
    assert result["msg"].startswith("assume_ended: ")


def test_a_prediction_that_fails_names_who_stays(run: Run, tree: ProcTree) -> None:
    """And not those who will have ended by then."""
    tree.add(7, opens=[tree.gpu(0)], maps=[tree.gpu(0)])
    tree.add(8, opens=[tree.gpu(0)], maps=[tree.gpu(0)])
    result = run("gpu_free", check_mode=True, assume_ended=[{"pid": 7, "start_time": 1007}], timeout=0)
    assert (result["rc"], result["verdict"], result["predicted_verdict"]) == (1, "busy", "busy")
    assert "PID 8" in result["msg"]
    assert "PID 7" not in result["msg"]


@pytest.mark.parametrize(
    "params",
    [
        {"memory_threshold": "10%"},
        {"memory_threshold": "much"},
        {"memory_threshold": "200GiB"},
        {"memory_baseline": "-1MiB"},
        {"expected_count": -1},
        {"stable_polls": 0},
        {"interval": 0},
        {"timeout": -1},
        {"devices": ["17"]},
        {"users": ["no-such-user-here"]},
        {"containers": ["129"]},
        {"nvml_timeout": -1},
        {"nvml_timeout": float("nan")},
        {"timeout": float("nan")},
        {"interval": float("inf")},
        {"users": ["99999999999"]},
        {"protect": ["exporter-*"]},
        {"protect": [""]},
        {"dev_dir": "/no/such/folder"},
    ],
)
def test_senseless_parameters_are_refused_naming_them(run: Run, params: dict[str, Any]) -> None:
    result = run("gpu_free", **params)
    assert result["failed"]
    assert result["msg"].startswith(next(iter(params)) + ": ")
    assert "Traceback" not in result["msg"]


def test_gpu_info_never_fails_for_what_it_sees(run: Run, tree: ProcTree) -> None:
    tree.add(7, comm="train", argv=["train", "--token=geheim"], cgroup="/lxc/129/ns/a.service", opens=[tree.gpu(0)])
    result = run("gpu_info")
    assert (result["rc"], result["verdict"], result["simulated"]) == (0, "busy", True)
    (row,) = result["holders"]
    assert (row["container"], row["unit"], row["decision"]) == ("lxc/129", "a.service", "holder")
    assert "geheim" not in json.dumps(result)
    assert result["binding_missing"] is False
    assert "ansible_facts" not in result


def test_gpu_info_tells_a_missing_binding_and_shows_the_holders_all_the_same(run: Run, tree: ProcTree) -> None:
    from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.nvml import missing_fault

    tree.nvml.fault = missing_fault("/x")
    tree.add(7, opens=[tree.gpu(1)])
    result = run("gpu_info")
    assert (result["rc"], result["binding_missing"], result["nvml"]["ok"]) == (0, True, False)
    assert [row["pid"] for row in result["holders"]] == [7]
    assert [gpu["node"] for gpu in result["gpus"]] == [str(tree.gpu(0)), str(tree.gpu(1))]


def test_all_modules_show_a_process_by_the_same_row(run: Run, tree: ProcTree) -> None:
    tree.add(7, opens=[tree.gpu(0)])
    (info,) = run("gpu_info")["holders"]
    (free,) = run("gpu_free", timeout=0)["holders"]
    assert info == free
    assert list(info) == (
        "pid start_time user comm cmdline devices gpus unit container guest_pid gpu_memory decision reason".split()
    )


def test_a_lease_is_given_back_only_by_its_run(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with Lease(str(folder), "mine").held():
        pass
    result = run("lease", lease="other", run_dir=str(folder))
    assert (result["changed"], result["held_by"]) == (False, "mine")
    result = run("lease", lease="mine", run_dir=str(folder), check_mode=True)
    assert result["changed"] is True
    result = run("lease", lease="mine", run_dir=str(folder))
    assert (result["changed"], result["held_by"]) == (True, "")
    result = run("lease", lease="mine", run_dir=str(folder))
    assert (result["changed"], result["held_by"]) == (False, "")


def test_the_control_nodes_binding_is_found_or_its_absence_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = lookup.LookupModule().run([])
    assert "def nvmlInit" in Path(path).read_text(encoding="utf-8")
    monkeypatch.setattr(lookup.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(AnsibleLookupError, match="nvidia-ml-py"):
        lookup.LookupModule().run([])
