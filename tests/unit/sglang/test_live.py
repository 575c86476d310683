# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A real server process: the stand-in, launched, awaited, proven, broken, wedged, killed.

Only this test's own processes are looked at: it is the reaper of its orphans, so that whatever it launched is below it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.survey import SurveyOptions, Surveyor
from ansible_collections.cleanslate.inference.plugins.module_utils.proc.table import ProcFS
from ansible_collections.cleanslate.inference.plugins.module_utils.sglang import (
    activity,
    launch,
    plan,
    prepare,
    process_backend,
    proof,
    ready,
    run,
)
from ansible_collections.cleanslate.inference.plugins.module_utils.sglang.declaration import Declaration
from ansible_collections.cleanslate.inference.plugins.module_utils.sglang.http import Client, Reply
from ansible_collections.cleanslate.inference.plugins.module_utils.sglang.runtime import Runtime, load
from ansible_collections.cleanslate.inference.plugins.module_utils.state.record import RecordStore

STANDIN = Path(__file__).resolve().parents[2] / "lab/standin"
KEY = "k-of-the-test-1234"
PR_SET_CHILD_SUBREAPER = 36


def _proctree():
    path = Path(__file__).resolve().parents[1] / "proctree.py"
    spec = importlib.util.spec_from_file_location("proctree_for_live", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


proctree = _proctree()


class OwnProcesses(ProcFS):
    """/proc, but only what lies below this process."""

    def pids(self):
        found, todo = [], [os.getpid()]
        while todo:
            pid = todo.pop()
            for task in self.tasks(pid):
                for child in (self.read(pid, "task/%d/children" % task) or b"").split():
                    found.append(int(child))
                    todo.append(int(child))
        return sorted(found)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Node:
    def __init__(self, folder):
        self.folder = folder
        for name in ("dev", "shm", "tmp", "model", "draft", "home"):
            (folder / name).mkdir()
        for number in range(4):
            (folder / "dev" / ("nvidia%d" % number)).write_bytes(bytes(4096))
        for name in ("nvidiactl", "nvidia-uvm"):
            (folder / "dev" / name).write_bytes(bytes(4096))
        for name, kind in (("model", "LlamaForCausalLM"), ("draft", "LlamaForCausalLMEagle3")):
            (folder / name / "config.json").write_text(json.dumps({"architectures": [kind], "model_type": "llama"}))
            (folder / name / "model.safetensors").write_bytes(b"x")
        self.state = str(folder / "state")
        self.fs = OwnProcesses()
        self.wedge = folder / "wedge"
        self.fields = {
            "model_path": str(folder / "model"),
            "gpus": ["0", "1"],
            "tp_size": 2,
            "port": free_port(),
            "backend": "process",
            "python": sys.executable,
            "api_key": KEY,
            "admin_api_key": "another-key-of-the-test",
            "nccl": {"ALGO": "Ring", "BUFFSIZE": 8388608},
            "environment": {
                "PYTHONPATH": str(STANDIN),
                "STANDIN_DEV_DIR": str(folder / "dev"),
                "STANDIN_SHM_DIR": str(folder / "shm"),
                "STANDIN_TMP_DIR": str(folder / "tmp"),
                "STANDIN_SPEED": "8",
                "STANDIN_WEDGE": str(self.wedge),
            },
            "args": {"enable_metrics": True, "max_running_requests": 8},
            "stall_timeout": 3.0,
        }

    def declaration(self, **changes):
        fields = {**self.fields, **changes}
        fields["environment"] = {**self.fields["environment"], **changes.get("environment", {})}
        return Declaration.from_params("main", fields)

    def survey(self):
        options = SurveyOptions(dev_dir=str(self.folder / "dev"), state_dir=self.state)
        nvml = proctree.FakeNvml(proctree.nvml_gpus(4))
        with Surveyor(options, fs=self.fs, nvml=nvml, self_pid=0) as surveyor:
            return surveyor.look()

    def launch(self, **changes):
        survey = self.survey()
        prepared = prepare.prepare(self.declaration(**changes), self.state, survey)
        return launch.launch(prepared, survey, self.state, fs=self.fs)

    def plan(self, **changes):
        return plan.Planner(
            self.declaration(**changes), self.survey(), {"scope": "match"}, self.state, fs=self.fs
        ).run()

    def runtime(self):
        return Runtime(load("main", self.state), self.state, self.fs)

    def wait(self, limit=30.0):
        runtime, cursor, told, answer = self.runtime(), {}, [], {}
        end = time.monotonic() + limit
        while time.monotonic() < end:
            answer = ready.wait(runtime, 2.0, cursor)
            told += answer["events"]
            cursor = json.loads(json.dumps(answer["cursor"]))
            if answer["state"] != "waiting":
                break
        answer["told"] = told
        if answer["state"] == "ready":
            ready.remember(runtime, self.state)
        return answer

    def prove(self):
        runtime = self.runtime()
        record = runtime.record
        rows = proof.prove_members(
            runtime.members(), record.pid, runtime.supervisor, record.details["declared"], record.details["salt"]
        )
        account = proof.account_of(runtime.client().first(["/server_info"], 10))
        arguments = proof.compare_arguments(record.details["arguments"], account)
        return rows, arguments, proof.verdict(rows, arguments, runtime.schedulers, account)

    def end(self):
        """End and reap everything below this test."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            alive = [pid for pid in self.fs.pids() if not self.reaped(pid)]
            if not alive:
                return
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        raise AssertionError("processes of the test are still there: %s" % self.fs.pids())

    @staticmethod
    def reaped(pid):
        with contextlib.suppress(ChildProcessError):
            return os.waitpid(pid, os.WNOHANG)[0] == pid
        return False


@pytest.fixture
def node(tmp_path):
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    made = Node(tmp_path)
    try:
        yield made
    finally:
        made.end()
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def test_the_whole_life(node):
    assert node.plan().verdict == "reset"

    done = node.launch()
    assert done.changed
    runtime = node.runtime()
    assert runtime.main_alive()
    assert os.getsid(runtime.record.pid) == runtime.record.pid != os.getsid(0)
    assert os.getsid(runtime.supervisor) == runtime.supervisor

    answer = node.wait()
    assert answer["state"] == "ready", answer
    assert any("weights are being loaded" in line for line in answer["told"])
    assert any("a generation came back from 2 workers" in line for line in answer["told"])

    rows, arguments, problems = node.prove()
    assert problems == []
    workers = [row for row in rows if row["role"] == "scheduler"]
    assert [row["rank"] for row in workers] == ["TP0", "TP1"]
    for row in workers:
        assert row["checked"] >= 6
        assert {item["name"]: item["effective"] for item in row["set_by_sglang"]}["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert {item["argument"] for item in arguments} >= {"tp_size", "port", "max_running_requests"}

    again = node.plan()
    assert again.verdict == "converged", again.message()
    assert not node.launch().changed

    # The key is in its file, and SGLang's own log; nowhere else.
    state = Path(node.state)
    holding = {path.name for path in state.rglob("*") if path.is_file() and KEY in path.read_text(errors="replace")}
    assert holding <= {"config.yaml", "server.log"}
    assert (state / "servers/main/config.yaml").stat().st_mode & 0o777 == 0o600
    assert (state / "servers/main/server.log").stat().st_mode & 0o777 == 0o600
    for pid in node.fs.pids():
        assert KEY.encode() not in (node.fs.read(pid, "cmdline") or b"")

    os.kill(workers[1]["pid"], signal.SIGKILL)
    broken = node.plan()
    assert broken.verdict == "reset"
    assert broken.reasons[0]["code"] in ("worker_dead", "dead")


def test_a_wedged_server(node):
    """Requests are running and nothing advances: wedged. Nothing is running: doubt, and it is left alone."""
    node.launch()
    assert node.wait()["state"] == "ready"
    node.wedge.touch()
    idle = node.plan()
    assert (idle.verdict, idle.reasons[0]["code"]) == ("unknown", "doubt"), idle.message()
    node.wedge.unlink()

    runtime = node.runtime()
    long = {"text": "Tell me everything", "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}}
    client = threading.Thread(target=runtime.client().post, args=("/generate", long, 60.0))
    client.start()
    deadline = time.monotonic() + 10
    while not activity.sample(runtime.client()).running and time.monotonic() < deadline:
        time.sleep(0.05)
    assert node.plan().verdict == "converged"
    node.wedge.touch()
    found = node.plan()
    node.wedge.unlink()
    client.join()
    assert (found.verdict, found.reasons[0]["code"]) == ("reset", "wedged"), found.message()


@pytest.mark.parametrize(
    ("fail_at", "cause"),
    [("weight:oom", "out_of_memory"), ("dist:nccl", "nccl"), ("graph:exit137", "killed"), ("memory:error", "error")],
)
def test_a_start_that_fails_is_told_at_once_with_the_reason(node, fail_at, cause):
    node.launch(environment={"STANDIN_FAIL_AT": fail_at})
    answer = node.wait()
    assert answer["state"] == "failed"
    assert answer["diagnosis"]["cause"] == cause, answer["diagnosis"]
    assert KEY not in json.dumps(answer)
    assert node.plan(environment={"STANDIN_FAIL_AT": fail_at}).reasons[0]["code"] in ("dead", "never_ready")


def test_what_was_ready_last_can_be_brought_back(node):
    """Not what was launched last; and with the keys of today."""
    assert launch.last_ready(node.state, node.declaration()) is None
    node.launch(environment={"HF_TOKEN": "old-token"})
    assert node.wait()["state"] == "ready"
    node.end()
    node.launch(environment={"STANDIN_FAIL_AT": "weight:oom", "HF_TOKEN": "new-token"}, tp_size=1)
    assert node.wait()["state"] == "failed"

    today = node.declaration(api_key="key-of-today", tp_size=1, environment={"HF_TOKEN": "new-token"})
    earlier = launch.last_ready(node.state, today)
    assert earlier.tp_size == 2
    assert "STANDIN_FAIL_AT" not in earlier.environment
    assert earlier.api_key == "key-of-today"
    assert earlier.environment["HF_TOKEN"] == "new-token"
    record = (Path(node.state) / "instances/main.json").read_text()
    assert "old-token" not in record
    assert KEY not in record


def test_a_key_that_is_wrong(node):
    node.launch()
    assert node.wait()["state"] == "ready"
    config = Path(node.state) / "servers/main/config.yaml"
    config.write_text(json.dumps({"api-key": "another-key"}))
    assert ready.wait(node.runtime(), 2.0, {})["diagnosis"]["cause"] == "key"


def test_a_program_that_cannot_be_run(node):
    survey = node.survey()
    prepared = prepare.prepare(node.declaration(), node.state, survey)
    prepared.complete.command.argv[0] = "/nowhere/python"
    with pytest.raises(CleanslateError, match="/nowhere/python"):
        launch.launch(prepared, survey, node.state, fs=node.fs)
    # The record says that a launch was tried; the next plan finds nothing running.
    assert RecordStore(node.state).load("main").pid == 0
    assert node.plan().verdict == "reset"


def test_a_changed_environment_of_a_worker_is_found(node):
    """What the proof looks at is the process, not our own notes."""
    node.launch()
    assert node.wait()["state"] == "ready"
    record = load("main", node.state)
    record.details["declared"]["environment NCCL_ALGO"] = "Tree"
    record.details["declared"]["environment NCCL_PROTO"] = "LL"
    RecordStore(node.state).save(record)
    _rows, _arguments, problems = node.prove()
    assert any("NCCL_ALGO is Ring, declared is Tree" in problem for problem in problems)
    assert any("NCCL_PROTO did not arrive" in problem for problem in problems)


def test_a_server_that_is_too_busy_to_tell_how_it_runs_is_no_failure(node, monkeypatch):
    """/server_info waits for the scheduler."""
    node.launch()
    assert node.wait()["state"] == "ready"
    monkeypatch.setattr(run, "Runtime", lambda record, state_dir: Runtime(record, state_dir, node.fs))
    params = {"instance": "main", "state_dir": node.state, "run_dir": str(node.folder / "run"), "timeout": 10.0}
    params.update(lease=None, release_lease=False)

    def prove(reply):
        with monkeypatch.context() as patch:
            if reply is not None:
                patch.setattr(Client, "first", lambda *_: reply)
            return run.prove_server(params, False)

    busy = prove(Reply(0, None, "timeout"))
    assert busy["proven"]
    assert "were not compared" in busy["notes"][0]
    assert not prove(Reply(0, None, "refused"))["proven"]

    told = prove(None)
    assert told["proven"]
    assert told["notes"] == []
    again = prove(Reply(0, None, "timeout"))
    assert again["proven"]
    assert "said earlier" in again["notes"][0]
    assert again["arguments"] == told["arguments"] != []
    assert KEY not in (Path(node.state) / "instances/main.json").read_text()


def test_the_exit_of_a_server_is_kept(node):
    node.launch()
    runtime = node.runtime()
    os.kill(runtime.record.pid, signal.SIGKILL)
    answer = node.wait()
    assert answer["state"] == "failed"
    assert "137" in answer["diagnosis"]["msg"]
    assert runtime.ending().code == -9


def test_term_to_the_supervisor_reaches_the_server(node):
    node.launch()
    assert node.wait()["state"] == "ready"
    runtime = node.runtime()
    os.kill(runtime.supervisor, signal.SIGTERM)
    deadline = time.monotonic() + 15
    while runtime.main_alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runtime.main_alive()


def test_logs_of_earlier_launches_are_kept_but_not_for_ever(tmp_path):
    log = tmp_path / "server.log"
    for number in range(8):
        log.write_text("launch %d\n" % number)
        process_backend.rotate(str(log), 3)
    assert log.read_text() == ""
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["server.log", "server.log.1", "server.log.2", "server.log.3"]
    assert (tmp_path / "server.log.1").read_text() == "launch 7\n"


def test_activity_counts_what_others_ask(node):
    """Not our own question alone: a server that advances for others while ours waits is busy."""
    node.launch()
    assert node.wait()["state"] == "ready"
    runtime = node.runtime()
    found = activity.look(runtime.client(), runtime.question(), runtime.log(), 3.0)
    assert found.state == activity.SERVES
