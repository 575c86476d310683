# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a play would do, over fixture trees of machines: converged, reset, blocked, unknown."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.nvml import fault_of, missing_fault
from ansible_collections.cleanslate.inference.plugins.module_utils.proc.table import ProcFS
from ansible_collections.cleanslate.inference.plugins.module_utils.sglang import (
    activity,
    launch,
    plan,
    prepare,
    resolver,
)
from ansible_collections.cleanslate.inference.plugins.module_utils.sglang.declaration import Declaration
from ansible_collections.cleanslate.inference.plugins.module_utils.state.record import InstanceRecord, RecordStore


def _load_proctree():
    path = Path(__file__).resolve().parents[1] / "proctree.py"
    spec = importlib.util.spec_from_file_location("proctree_for_sglang", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


proctree = _load_proctree()
PORT = 31000
BOOT = "5a3e0d54-0000-4000-8000-000000000001"
MAIN, TP0, TP1, DETOKENIZER = 500, 510, 511, 512


class Node:
    """A machine with four GPUs, a model, and SGLang 0.5.23."""

    def __init__(self, folder):
        self.tree = proctree.ProcTree(folder / "machine", gpus=4)
        boot = self.tree.proc / "sys/kernel/random"
        boot.mkdir(parents=True)
        (boot / "boot_id").write_text(BOOT + "\n")
        (self.tree.proc / "net").mkdir()
        self.listens = []
        self.model = folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text("{}")
        (self.model / "model.safetensors").write_bytes(b"x")
        self.fields = {
            "model_path": str(self.model),
            "gpus": ["0", "1"],
            "tp_size": 2,
            "port": PORT,
            "backend": "process",
            "python": sys.executable,
            "nccl": {"ALGO": "Ring"},
        }
        self.state = self.tree.state
        self.fs = ProcFS(str(self.tree.proc))

    def listen(self, pid, port=PORT):
        inode = 9000 + len(self.listens)
        self.listens.append(
            "%d: 0100007F:%04X 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 %d"
            % (len(self.listens), port, inode)
        )
        (self.tree.proc / "net/tcp").write_text("header\n" + "\n".join(self.listens) + "\n")
        (self.tree.proc / str(pid) / "fd/90").symlink_to("socket:[%d]" % inode)

    def declaration(self, **changes):
        return Declaration.from_params("main", {**self.fields, **changes})

    def server(self, mark="main", gpus=(0, 1), first=MAIN, name="sglang.launch_server"):
        """A running server: main, two workers, a detokenizer."""
        environ = (
            {"CLEANSLATE_INSTANCE": mark, "CUDA_VISIBLE_DEVICES": ",".join(proctree.uuid(g) for g in gpus)}
            if mark
            else {}
        )
        nodes = [self.tree.gpu(g) for g in gpus]
        common = {"pgrp": first, "environ": environ, "uid": os.getuid()}
        self.tree.add(first, argv=[sys.executable, "-m", name, "--port", str(PORT)], maps=nodes, opens=nodes, **common)
        for rank, gpu in enumerate(gpus):
            self.tree.add(
                first + 10 + rank,
                comm="sglang::schedul",
                argv=["sglang::scheduler_TP%d" % rank],
                ppid=first,
                maps=[self.tree.gpu(gpu)],
                opens=[self.tree.gpu(gpu)],
                **common,
            )
        self.tree.add(
            first + 12, comm="sglang::detoken", argv=["sglang::detokenizer"], ppid=first, maps=nodes, **common
        )

    def record(self, ready=True, **changes):
        """As server_launch and server_ready would have left it."""
        declaration = self.declaration(**changes)
        with self.tree.surveyor() as surveyor:
            prepared = prepare.prepare(declaration, str(self.state), surveyor.look())
        record = InstanceRecord(
            name="main",
            backend="process",
            pid=MAIN,
            start_time=1000 + MAIN,
            pgrp=MAIN,
            boot_id=BOOT,
            gpus=prepared.complete.uuids,
            port=declaration.port,
            ports=[declaration.port],
            ready_at=1.0 if ready else 0.0,
            simulated=True,
            details={"declared": prepared.complete.state("salt"), "salt": "salt", "schedulers": 2},
        )
        RecordStore(str(self.state)).save(record)
        return record

    def plan(self, always=False, scope="match", check_mode=True, options=None, assume_ended=(), **changes):
        with self.tree.surveyor() as surveyor:
            return plan.Planner(
                self.declaration(**changes),
                surveyor.look(),
                {"scope": scope, **(options or {})},
                str(self.state),
                always=always,
                check_mode=check_mode,
                fs=self.fs,
                assume_ended=assume_ended,
            ).run()


@pytest.fixture
def node(tmp_path, monkeypatch):
    made = Node(tmp_path)
    made.answer = resolver.Answer({"tp_size": 2}, [], [], False)
    made.version = "0.5.23"
    made.found = activity.Finding(activity.SERVES, "a generation came back")
    made.asked = 0

    def look(*_args):
        made.asked += 1
        return made.found

    monkeypatch.setattr(
        resolver, "find", lambda python, *_: resolver.Identity(python or "/opt/python", made.version, "/opt")
    )
    monkeypatch.setattr(resolver, "resolve", lambda *_, **__: made.answer)
    monkeypatch.setattr(activity, "look", look)
    return made


def codes(result):
    return [reason["code"] for reason in result.reasons], [finding.code for finding in result.blocked]


def running(node):
    node.server()
    node.listen(MAIN)
    node.record()


def test_a_fresh_node(node):
    result = node.plan()
    assert result.verdict == "reset"
    assert codes(result) == (["not_launched"], [])
    assert result.plan.empty
    assert result.as_dict()["devices"] == [proctree.uuid(0), proctree.uuid(1)]


def test_the_declared_server_runs(node):
    running(node)
    result = node.plan()
    assert result.verdict == "converged"
    assert result.as_dict()["teardown"]["targets"] == []
    assert result.changes == []


def test_a_busy_server_is_converged(node):
    running(node)
    node.found = activity.Finding(activity.ADVANCES, "it is busy")
    assert node.plan().verdict == "converged"


def test_a_wedged_server_is_reset(node):
    running(node)
    node.found = activity.Finding(activity.WEDGED, "nothing advances")
    result = node.plan()
    assert (result.verdict, codes(result)[0]) == ("reset", ["wedged"])
    assert result.plan.target_pids == {MAIN, TP0, TP1, DETOKENIZER}


def test_doubt_leaves_it_untouched(node):
    running(node)
    node.found = activity.Finding(activity.DOUBT, "paused")
    result = node.plan()
    assert result.verdict == "unknown"
    assert result.as_dict()["teardown"]["targets"] == []


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"nccl": {"ALGO": "allreduce:tree"}}, "environment NCCL_ALGO"),
        ({"args": {"enable_metrics": True}}, "--enable-metrics"),
        ({"api_key": "a-new-key"}, "--api-key"),
        ({"environment": {"X": "1"}}, "environment X"),
        ({"gpus": ["1", "0"]}, "environment CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_changed_declaration_is_reset_without_asking_the_server(node, changes, key):
    running(node)
    result = node.plan(**changes)
    assert (result.verdict, codes(result)[0]) == ("reset", ["changed"])
    assert [change["key"] for change in result.changes] == [key]
    assert node.asked == 0


def test_an_upgraded_sglang_is_a_change(node):
    running(node)
    node.version = "0.5.24"
    assert [change["key"] for change in node.plan().changes] == ["sglang version"]


def test_moving_to_other_gpus_ends_the_server_on_the_old_ones(node):
    running(node)
    result = node.plan(gpus=["2", "3"])
    assert result.verdict == "reset"
    assert result.plan.target_pids == {MAIN, TP0, TP1, DETOKENIZER}
    assert result.as_dict()["devices"] == [proctree.uuid(n) for n in (2, 3, 0, 1)]


@pytest.mark.parametrize(
    ("dead", "reason"),
    [([TP1], "worker_dead"), ([MAIN], "dead"), ([MAIN, TP0, TP1, DETOKENIZER], "dead")],
)
def test_dead_processes(node, dead, reason):
    node.server()
    if MAIN not in dead:
        node.listen(MAIN)
    node.record()
    node.tree.end(*dead)
    result = node.plan()
    assert (result.verdict, codes(result)[0]) == ("reset", [reason])


def test_another_boot(node):
    running(node)
    node.tree.end(MAIN, TP0, TP1, DETOKENIZER)
    (node.tree.proc / "sys/kernel/random/boot_id").write_text("other\n")
    node.tree.add(MAIN, comm="bash")
    (node.tree.proc / "net/tcp").write_text("header\n")
    result = node.plan()
    assert (result.verdict, codes(result)[0]) == ("reset", ["dead"])
    assert result.plan.target_pids == set()


def launched(node, ago, listens=False):
    """A launch that nobody waited for."""
    node.server()
    if listens:
        node.listen(MAIN)
    record = node.record(ready=False)
    record.details["launched_boottime"] = time.clock_gettime(time.CLOCK_BOOTTIME) - ago
    RecordStore(str(node.state)).save(record)


@pytest.mark.parametrize("check_mode", [True, False])
def test_a_server_that_came_up_after_its_play_was_interrupted_is_converged(node, check_mode):
    launched(node, 2000, listens=True)
    assert node.plan(check_mode=check_mode).verdict == "converged"
    assert bool(RecordStore(str(node.state)).load("main").ready_at) is not check_mode


def test_one_that_came_up_and_is_not_understood_is_doubt(node):
    launched(node, 100, listens=True)
    node.found = activity.Finding(activity.DOUBT, "refuses")
    assert node.plan(check_mode=False).verdict == "unknown"
    assert not RecordStore(str(node.state)).load("main").ready_at


def test_a_server_that_still_loads_is_left_to_it(node):
    launched(node, 100)
    node.tree.end(TP1)
    result = node.plan()
    assert (result.verdict, codes(result)[0]) == ("unknown", ["loading"])
    assert node.asked == 0


def test_a_server_that_still_loads_and_is_declared_otherwise_now_is_reset(node):
    launched(node, 100)
    assert codes(node.plan(environment={"X": "1"}))[0] == ["changed"]


def test_a_launch_that_never_became_ready(node):
    launched(node, 901)
    assert codes(node.plan())[0] == ["never_ready"]


def test_a_launch_that_says_that_it_never_will_be_ready(node):
    launched(node, 100)
    folder = node.state / "servers/main"
    folder.mkdir(parents=True)
    (folder / "server.log").write_text("ERROR: [Errno 98] error while attempting to bind on address\n")
    assert codes(node.plan())[0] == ["never_ready"]


def test_a_server_that_does_not_listen(node):
    node.server()
    node.record()
    assert codes(node.plan())[0] == ["not_listening"]


def test_always(node):
    running(node)
    result = node.plan(always=True)
    assert (result.verdict, codes(result)[0]) == ("reset", ["asked"])
    assert result.plan.target_pids == {MAIN, TP0, TP1, DETOKENIZER}


def test_a_stranger_on_the_gpus_blocks_and_is_named(node):
    node.tree.add(700, comm="train", argv=["./train"], maps=[node.tree.gpu(1)])
    result = node.plan()
    assert result.verdict == "blocked"
    (finding,) = result.blocked
    assert (finding.code, finding.variable) == ("foreign_holder", "sglang_server_gpus")
    assert "700" in finding.msg
    assert 700 not in result.plan.target_pids


def test_a_stranger_blocks_even_while_the_declared_server_runs(node):
    running(node)
    node.tree.add(700, comm="train", argv=["./train"], maps=[node.tree.gpu(1)])
    assert node.plan().verdict == "blocked"


def test_a_stranger_on_other_gpus_is_no_matter(node):
    node.tree.add(
        700,
        comm="train",
        argv=["./train"],
        maps=[node.tree.gpu(3)],
        opens=[node.tree.gpu(n) for n in range(4)],
        environ={"CUDA_VISIBLE_DEVICES": "3"},
    )
    assert node.plan().verdict == "reset"


def test_under_scope_all_the_stranger_would_be_ended(node):
    node.tree.add(700, comm="train", argv=["./train"], maps=[node.tree.gpu(1)])
    result = node.plan(scope="all")
    assert result.verdict == "reset"
    assert result.plan.target_pids == {700}


def test_remains_of_an_unknown_server_would_be_ended(node):
    node.server(mark="", first=800)
    node.tree.end(800)
    result = node.plan()
    assert result.verdict == "reset"
    assert result.plan.target_pids == {810, 811, 812}


def test_a_foreign_listener_blocks(node):
    node.tree.add(701, comm="nginx", argv=["nginx"])
    node.listen(701)
    result = node.plan()
    assert codes(result)[1] == ["port_busy"]
    assert "nginx" in result.blocked[0].msg


def test_a_listener_out_of_sight_blocks(node):
    (node.tree.proc / "net/tcp").write_text(
        "header\n0: 00000000:%04X 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 77\n" % PORT
    )
    assert "out of sight" in node.plan().blocked[0].msg


def test_ports_in_the_arguments_count(node):
    node.tree.add(701, comm="nginx", argv=["nginx"])
    node.listen(701, port=32000)
    assert node.plan().verdict == "reset"
    assert codes(node.plan(args={"nccl_port": 32000}))[1] == ["port_busy"]


def test_memory_that_nobody_holds_blocks(node):
    node.tree.nvml.set(1, used=4096)
    assert codes(node.plan())[1] == ["memory_no_owner"]


@pytest.mark.parametrize("listens", [True, False], ids=["listens", "still loads"])
def test_a_live_server_without_a_record_wants_always(node, listens):
    """Whether it answers is no matter: one that is busy or loads does not."""
    node.server(mark="", first=800)
    if listens:
        node.listen(800)
    result = node.plan()
    assert codes(result)[1] == ["unrecorded_server"]
    assert result.blocked[0].variable == "cleanslate_reset"
    result = node.plan(always=True)
    assert result.verdict == "reset"
    assert 800 in result.plan.target_pids


def test_a_client_of_the_driver_that_holds_no_gpu_is_spared_as_the_teardown_spares_it(node):
    node.tree.add(700, comm="exporter", argv=["./exporter"], opens=[node.tree.dev / "nvidiactl"])
    result = node.plan(scope="all")
    assert (result.verdict, result.plan.target_pids) == ("reset", set())


def findings(result):
    return [(finding.code, finding.variable) for finding in result.blocked]


GPUS, BASELINE = "sglang_server_gpus", "gpu_teardown_memory_baseline"


@pytest.mark.parametrize(
    ("changes", "options", "found"),
    [
        ({"processes": [(4242, 9000)], "used": 9000}, {}, [("owner_other_namespace", GPUS)]),
        ({"recovery_action": "gpu reset"}, {}, [("reset_required", GPUS)]),
        ({"used": 100}, {}, []),
        ({"used": 200}, {}, [("memory_no_owner", GPUS)]),
        ({"used": 200}, {"memory_threshold": "256MiB"}, []),
        ({"used": 600, "memory_version": 1}, {}, [("memory_no_owner", BASELINE)]),
        ({"used": 600, "memory_version": 1}, {"memory_baseline": "500MiB"}, []),
        ({"used": 5000, "numa_node": 1}, {}, []),
        ({}, {"expected_count": 8}, [("count_mismatch", "gpu_teardown_expected_count")]),
        ({}, {"memory_threshold": "much"}, [("teardown", "gpu_teardown_memory_threshold")]),
    ],
)
def test_gpus_are_judged_as_the_proof_after_the_teardown_will(node, changes, options, found):
    node.tree.nvml.set(1, **changes)
    assert findings(node.plan(options=options)) == found


def test_a_server_that_gives_its_gpu_up_first_is_not_in_the_way(node):
    node.tree.add(700, comm="train", argv=["./train"], maps=[node.tree.gpu(1)])
    node.listen(700)
    assert findings(node.plan(assume_ended=[(700, 1700)])) == []
    # Another process of that pid is another process.
    assert {code for code, _ in findings(node.plan(assume_ended=[(700, 1)]))} == {"foreign_holder", "port_busy"}


def test_other_gpus_are_no_matter(node):
    node.tree.nvml.set(3, recovery_action="gpu reset", used=5000)
    assert findings(node.plan()) == []


def test_a_display_that_is_spared_counts_by_its_memory(node):
    node.tree.add(900, comm="Xorg", argv=["/usr/lib/xorg/Xorg"], exe="/usr/lib/xorg/Xorg", maps=[node.tree.gpu(1)])
    node.tree.nvml.set(1, used=200, processes=[(900, 200, "graphics")])
    assert findings(node.plan()) == [("memory_benign_holder", "gpu_teardown_memory_threshold")]
    assert findings(node.plan(options={"memory_threshold": "256MiB"})) == []


def test_what_the_declared_server_itself_uses_does_not_count(node):
    running(node)
    for number, worker in ((0, TP0), (1, TP1)):
        node.tree.nvml.set(number, used=90000, processes=[(worker, 89500), (MAIN, 500)])
    assert node.plan().verdict == "converged"


def test_all_that_is_wrong_comes_at_once(node):
    node.tree.add(700, comm="train", argv=["./train"], maps=[node.tree.gpu(1)])
    node.tree.add(701, comm="nginx", argv=["nginx"])
    node.listen(701)
    (node.model / "model.safetensors").unlink()
    result = node.plan(nccl={"BUFFSIZE": "4M"}, gpus=["0", "1", "9"], mem_fraction_static=9.0)
    assert result.verdict == "blocked"
    assert {finding.code for finding in result.blocked} >= {
        "declaration",
        "nccl_value",
        "gpu_unknown",
        "missing_path",
        "foreign_holder",
        "port_busy",
    }
    assert result.message().count("\n- ") == len(result.blocked)


def test_a_missing_model_says_it_once(node):
    node.answer = resolver.Answer(
        None, [plan.Finding("sglang", "Repo id must be …", "sglang_server_model_path")], [], False
    )
    result = node.plan(model_path="/nowhere/model")
    assert codes(result)[1] == ["missing_path"]


def test_what_sglang_refuses_blocks(node):
    running(node)
    node.answer = resolver.Answer(
        None, [plan.Finding("sglang", "unrecognized arguments", "sglang_server_args")], [], False
    )
    assert node.plan().verdict == "blocked"


def test_no_python(node, monkeypatch):
    def find(*_):
        raise CleanslateError("no Python with SGLang was found")

    monkeypatch.setattr(resolver, "find", find)
    result = node.plan()
    assert codes(result)[1] == ["python"]
    assert result.as_dict()["argv"] == []


@pytest.mark.parametrize(
    ("gpus", "tp_size", "code"),
    [(["0"], 2, "gpu_count"), (["7"], 1, "gpu_unknown"), (["0", proctree.uuid(0)], 2, "gpu_unknown")],
)
def test_gpus_that_do_not_fit(node, gpus, tp_size, code):
    assert code in codes(node.plan(gpus=gpus, tp_size=tp_size))[1]


def test_no_gpus_declared_are_all_of_the_node(node):
    result = node.plan(gpus=[])
    assert [gpu.index for gpu in result.prepared.gpus] == [0, 1, 2, 3]
    assert any("4 GPUs are given" in note for note in result.notes)


def test_a_blind_driver_is_doubt(node):
    running(node)
    node.tree.nvml.fault = fault_of(9, "Driver Not Loaded")
    assert node.plan().verdict == "unknown"


def test_a_missing_binding_is_doubt_but_in_check_mode(node):
    """Check mode places nothing; the run itself begins by doing so."""
    node.tree.nvml.fault = missing_fault("/var/lib/cleanslate/lib")
    assert node.plan(check_mode=False).verdict == "unknown"
    planned = node.plan(check_mode=True)
    assert planned.verdict == "reset"
    assert any("placed by the run itself" in note for note in planned.notes)
    assert planned.as_dict()["environment"]["CUDA_VISIBLE_DEVICES"] == "UUID-of-GPU-0,UUID-of-GPU-1"


def test_a_damaged_record_stops_it(node):
    running(node)
    path = node.state / "instances/main.json"
    path.write_text("{")
    with pytest.raises(CleanslateError, match="is damaged"):
        node.plan()


def test_nothing_secret_in_a_result(node):
    running(node)
    result = node.plan(api_key="a-key-of-the-test", environment={"HF_TOKEN": "t-of-the-test"})
    text = json.dumps(result.as_dict()) + result.message()
    assert "a-key-of-the-test" not in text
    assert "t-of-the-test" not in text


def test_a_launch_refuses_when_the_port_was_taken_meanwhile(node):
    node.tree.add(701, comm="nginx", argv=["nginx"])
    node.listen(701)
    with node.tree.surveyor() as surveyor:
        survey = surveyor.look()
        prepared = prepare.prepare(node.declaration(), str(node.state), survey)
        with pytest.raises(CleanslateError, match="Port 31000 is taken by 701"):
            launch.launch(prepared, survey, str(node.state), fs=node.fs)
    assert not (node.state / "instances").exists()


def test_a_launch_refuses_over_a_holder_and_over_itself(node):
    running(node)
    node.tree.add(700, comm="train", argv=["./train"], maps=[node.tree.gpu(1)])
    with node.tree.surveyor() as surveyor:
        survey = surveyor.look()
        prepared = prepare.prepare(node.declaration(tp_size=1), str(node.state), survey)
        with pytest.raises(CleanslateError, match=r"(?s)still runs.*held by PID 700"):
            launch.launch(prepared, survey, str(node.state), fs=node.fs)


def test_check_mode_writes_nothing(node):
    with node.tree.surveyor() as surveyor:
        survey = surveyor.look()
        prepared = prepare.prepare(node.declaration(api_key="a-key-of-the-test"), str(node.state), survey)
        done = launch.launch(prepared, survey, str(node.state), check_mode=True, fs=node.fs)
    assert done.changed
    assert list(node.state.iterdir()) == []
    assert "a-key-of-the-test" not in str(done.diff)
    assert "NCCL_ALGO = Ring" in done.diff[0]["after"]


def test_the_same_server_again_is_no_launch(node):
    running(node)
    with node.tree.surveyor() as surveyor:
        survey = surveyor.look()
        prepared = prepare.prepare(node.declaration(), str(node.state), survey)
        assert not launch.launch(prepared, survey, str(node.state), fs=node.fs).changed
