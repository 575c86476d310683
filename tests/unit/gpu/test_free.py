# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The free check on fixture trees: the given/when/then cases that need no signal, and their relatives."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.common.clock import Clock
from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.free import (
    FreeOptions,
    check_free,
    identities,
    predict_free,
    prove_free,
)
from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.nvml import (
    NvmlGpu,
    fault_of,
    missing_fault,
    timeout_fault,
)
from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.survey import SurveyOptions, Surveyor
from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.verdict import Limits, judge
from ansible_collections.cleanslate.inference.plugins.module_utils.state.record import InstanceRecord, RecordStore

from ..proctree import MIB, FakeClock, FakeNvml, ProcTree, nvml_gpus, uuid


def check(tree: ProcTree, clock: FakeClock | None = None, timeout: float = 0.0, **more: Any) -> dict[str, Any]:
    """One free check; C(more) are limits, or options of the survey."""
    names = ("expected_count", "memory_threshold", "memory_baseline")
    limits = Limits(**{name: more.pop(name) for name in names if name in more})
    with tree.surveyor(**more) as surveyor:
        return prove_free(surveyor, FreeOptions(limits, timeout=timeout), clock or FakeClock()).data()


@pytest.fixture
def tree(tmp_path: Path) -> ProcTree:
    return ProcTree(tmp_path, gpus=2, real=True)


def test_an_idle_machine_is_free_after_stable_looks(tree: ProcTree) -> None:
    result = check(tree)
    assert result["free"] is True
    assert (result["verdict"], result["reasons"], result["polls"]) == ("free", [], 2)
    assert [gpu["verdict"] for gpu in result["gpus"]] == ["free", "free"]
    assert result["msg"] == "All 2 GPUs are free."


def test_a_holder_is_named_with_all_that_is_known_of_it(tree: ProcTree) -> None:
    tree.add(
        471,
        comm="sglang::schedul",
        argv=["sglang::scheduler_TP0", "--api-key", "geheim"],
        cgroup="/system.slice/sglang-main.service",
        maps=[tree.gpu(1)],
        opens=[tree.gpu(1)],
    )
    tree.nvml.set(1, used=46000, processes=[(471, 45000)])
    result = check(tree)
    assert (result["verdict"], result["reasons"]) == ("busy", ["holder"])
    (row,) = result["holders"]
    assert row["pid"] == 471
    assert row["start_time"] == 1471
    assert row["unit"] == "sglang-main.service"
    assert row["devices"] == [str(tree.gpu(1))]
    assert row["gpu_memory"] == 45000 * MIB
    assert "geheim" not in str(result)
    assert [gpu["verdict"] for gpu in result["gpus"]] == ["free", "busy"]
    assert result["gpus"][1]["holders"][0]["pid"] == 471
    assert "GPU 1 is busy" in result["msg"]
    assert "PID 471" in result["msg"]
    assert "systemctl stop sglang-main.service" in result["msg"]


# C1


def test_the_holder_is_a_forked_child_while_nvml_names_its_dead_parent(tree: ProcTree) -> None:
    tree.add(471, comm="python3", argv=["python3", "loader.py"], opens=[tree.gpu(0)])
    tree.nvml.set(0, used=4622, processes=[(465, 4614)])
    result = check(tree)
    assert (result["verdict"], result["reasons"]) == ("busy", ["holder"])
    assert [row["pid"] for row in result["holders"]] == [471]
    assert result["nvml_processes"] == [
        {"gpu": 0, "pid": 465, "kind": "compute", "gpu_memory": 4614 * MIB, "in_proc": False, "holder": False}
    ]
    tree.end(471)
    tree.nvml.set(0, used=0, processes=[])
    assert check(tree)["verdict"] == "free"


def test_a_thread_of_a_zombie_leader_is_a_holder_and_a_plain_zombie_is_none(tree: ProcTree) -> None:
    tree.add(500, comm="worker", state="Z", threads=2, tasks={501: [tree.gpu(0)]})
    tree.add(600, comm="dead", state="Z", threads=1)
    result = check(tree)
    assert [row["pid"] for row in result["holders"]] == [500]
    assert "zombie leader, 1 live thread" in result["holders"][0]["reason"]
    assert result["scan"]["unreadable"] == []


def test_who_is_ending_has_let_go_of_its_files_before_the_driver_lets_go_of_it(tree: ProcTree) -> None:
    """Seen on H200s: for a tenth of a second NVML lists a process that has nothing open any more."""
    tree.add(52, comm="python3.12", argv=[], state="R", flags=0x0040014C)
    tree.nvml.set(0, used=102923, processes=[(52, 102918)])
    result = check(tree)
    assert (result["verdict"], result["reasons"]) == ("busy", ["holder"])
    assert "PID 52 (python3.12) with 100.5 GiB, which is ending" in result["msg"]


# C3


def _safe_machine(tree: ProcTree) -> None:
    node = [tree.gpu(0)]
    tree.add(10, comm="nvidia-persistenced", argv=["/usr/bin/nvidia-persistenced", "--user", "x"], opens=node)
    tree.add(11, comm="nv-hostengine", argv=["/usr/bin/nv-hostengine"], exe="/usr/bin/nv-hostengine", opens=node)
    tree.add(12, comm="dcgm-exporter", argv=["dcgm-exporter"], exe="/usr/bin/dcgm-exporter", opens=node)
    tree.add(13, comm="Xorg", argv=["/usr/lib/xorg/Xorg", ":0"], opens=node, maps=node)
    tree.add(20, comm="sglang::scheduler_TP0", argv=["sglang::scheduler_TP0"], opens=node, maps=node)
    tree.add(21, argv=["python3", "/opt/dcgm-exporter-report/train.py"], exe="/usr/bin/python3.12", opens=node)
    tree.nvml.set(0, used=40060, processes=[(13, 60, "graphics"), (20, 39000), (21, 1000)])


def test_a_substring_of_a_safe_name_protects_nobody(tree: ProcTree) -> None:
    _safe_machine(tree)
    result = check(tree)
    assert [row["pid"] for row in result["holders"]] == [20, 21]
    assert [row["pid"] for row in result["benign_holders"]] == [10, 11, 12, 13]


def test_benign_holders_alone_leave_the_gpu_free(tree: ProcTree) -> None:
    _safe_machine(tree)
    tree.end(20, 21)
    tree.nvml.set(0, used=60, processes=[(13, 60, "graphics")])
    result = check(tree)
    assert result["verdict"] == "free"
    assert [row["pid"] for row in result["benign_holders"]] == [10, 11, 12, 13]
    assert all(row["decision"] == "benign" for row in result["benign_holders"])


def test_memory_of_a_benign_holder_counts_above_the_threshold_and_is_blamed_on_it(tree: ProcTree) -> None:
    _safe_machine(tree)
    tree.end(20, 21)
    tree.nvml.set(0, used=60, processes=[(13, 60, "graphics")])
    result = check(tree, memory_threshold=32 * MIB)
    assert (result["verdict"], result["reasons"]) == ("busy", ["memory_benign_holder"])
    assert "Xorg" in result["msg"]


def test_memory_that_a_benign_holder_does_not_explain_has_no_owner(tree: ProcTree) -> None:
    _safe_machine(tree)
    tree.end(20, 21)
    tree.nvml.set(0, used=14000, processes=[(13, 60, "graphics")])
    assert check(tree)["reasons"] == ["memory_no_owner"]


# C4


@pytest.mark.parametrize("memory", [20480, None])
def test_a_pid_of_another_namespace_is_busy_and_blames_no_local_process(tree: ProcTree, memory: int | None) -> None:
    tree.add(812, comm="sshd", argv=["sshd: root@pts/0"])
    tree.nvml.set(0, used=20480 if memory else 0, processes=[(812, memory)])
    result = check(tree)
    assert (result["verdict"], result["reasons"]) == ("busy", ["owner_other_namespace"])
    assert result["holders"] == []
    assert result["nvml_processes"][0]["in_proc"] is True
    assert result["nvml_processes"][0]["holder"] is False


@pytest.mark.parametrize("pid", [0, 4294967295, 4194305])
def test_impossible_pids_are_busy_and_named(tree: ProcTree, pid: int) -> None:
    tree.nvml.set(0, processes=[(pid, 10)])
    result = check(tree)
    assert (result["verdict"], result["reasons"]) == ("busy", ["invalid_pid"])
    assert result["nvml_processes"][0]["in_proc"] is False


# C5


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (fault_of(9, "Driver Not Loaded"), "nvml_unavailable"),
        (fault_of(12, "NVML Shared Library Not Found"), "nvml_unavailable"),
        (fault_of(17, "The operating system has blocked the request."), "nvml_unavailable"),
        (fault_of(18, "mismatch"), "version_mismatch"),
        (fault_of(999, "Unknown Error"), "nvml_unavailable"),
        (timeout_fault(5.0), "nvml_timeout"),
        (missing_fault("/var/lib/cleanslate/lib"), "binding_missing"),
    ],
)
def test_a_blind_instrument_is_unknown_at_once(tree: ProcTree, fault: Any, reason: str) -> None:
    tree.nvml.fault = fault
    clock = FakeClock()
    result = check(tree, clock, timeout=30)
    assert (result["verdict"], result["reasons"]) == ("unknown", [reason])
    assert [gpu["verdict"] for gpu in result["gpus"]] == ["unknown", "unknown"]
    assert clock.pauses == []
    assert result["details"][0]["advice"]


def test_a_holder_is_busy_even_when_nvml_is_blind(tree: ProcTree) -> None:
    tree.nvml.fault = fault_of(9, "Driver Not Loaded")
    tree.add(50, opens=[tree.gpu(1)])
    result = check(tree)
    assert result["verdict"] == "busy"
    assert result["gpus"][1]["verdict"] == "busy"
    assert result["gpus"][0]["verdict"] == "unknown"


def test_one_missing_gpu_is_a_mismatch(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path, gpus=8, real=True)
    del tree.nvml.gpus[7]
    result = check(tree)
    assert result["free"] is False
    assert result["reasons"] == ["count_mismatch"]
    assert "7 of 8" in result["msg"]


def test_more_gpus_than_expected_are_a_mismatch_too(tree: ProcTree) -> None:
    result = check(tree, expected_count=1)
    assert result["reasons"] == ["count_mismatch"]
    assert "2 of 1" in result["msg"]


def test_the_count_is_of_the_machine_whatever_was_chosen(tree: ProcTree) -> None:
    assert check(tree, devices=["1"], expected_count=2)["verdict"] == "free"
    assert check(tree, devices=["1"], expected_count=1)["reasons"] == ["count_mismatch"]


def test_a_lost_gpu_fails_alone(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path, gpus=8, real=True)
    tree.nvml.gpus[3] = NvmlGpu(index=3, error=fault_of(15, "GPU is lost", gpu=True))
    result = check(tree)
    assert (result["free"], result["reasons"]) == (False, ["gpu_lost"])
    assert [gpu["index"] for gpu in result["gpus"] if gpu["verdict"] != "free"] == [3]


def test_no_gpu_at_all_passes_only_when_zero_was_said(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path, gpus=0, real=True)
    assert check(tree)["verdict"] == "unknown"
    assert check(tree, expected_count=0)["verdict"] == "free"
    tree.nvml.fault = fault_of(9, "Driver Not Loaded")
    assert check(tree)["verdict"] == "unknown"
    assert check(tree, expected_count=0)["verdict"] == "free"
    tree.nvml.fault = timeout_fault(5.0)
    assert check(tree, expected_count=0)["verdict"] == "unknown"


def test_a_gpu_that_is_seen_and_not_permitted_is_noted_and_not_counted(tree: ProcTree) -> None:
    tree.nvml.gpus.append(NvmlGpu(index=2, error=fault_of(17, "blocked", gpu=True)))
    result = check(tree)
    assert (result["verdict"], result["notes"]) == ("free", ["gpu_not_permitted"])
    assert [gpu["index"] for gpu in result["gpus"]] == [0, 1]


def test_a_gpu_that_must_be_reset_is_not_free(tree: ProcTree) -> None:
    tree.nvml.set(1, recovery_action="drain and reset the GPU")
    result = check(tree)
    assert (result["verdict"], result["reasons"]) == ("unknown", ["reset_required"])
    tree.nvml.set(1, recovery_action="none", error=16)
    assert check(tree)["reasons"] == ["reset_required"]


# C6


@pytest.mark.parametrize(
    ("used", "verdict", "reasons"),
    [(0, "free", []), (10, "free", []), (128, "free", []), (129, "busy", ["memory_no_owner"])],
)
def test_memory_is_compared_in_bytes_and_never_in_percent(
    tree: ProcTree, used: int, verdict: str, reasons: list[str]
) -> None:
    tree.nvml.set(0, used=used)
    result = check(tree)
    assert (result["verdict"], result["reasons"]) == (verdict, reasons)
    assert result["gpus"][0]["memory_used"] == used * MIB


def test_a_tenth_of_the_memory_is_no_free_gpu(tree: ProcTree) -> None:
    tree.nvml.set(0, used=14000)
    assert check(tree)["reasons"] == ["memory_no_owner"]


def test_memory_of_version_1_needs_a_baseline(tree: ProcTree) -> None:
    tree.nvml.set(0, used=615, memory_version=1, memory_reserved=None)
    result = check(tree)
    assert (result["verdict"], result["reasons"]) == ("unknown", ["memory_no_owner"])
    assert "memory_baseline" in result["msg"]
    assert check(tree, memory_baseline=615 * MIB)["verdict"] == "free"
    assert check(tree, memory_baseline=400 * MIB)["verdict"] == "busy"


def test_memory_that_cannot_be_measured_is_judged_by_holders(tree: ProcTree) -> None:
    tree.nvml.set(0, memory_used=None, memory_total=None, memory_reserved=None)
    result = check(tree)
    assert (result["verdict"], result["gpus"][0]["notes"]) == ("free", ["memory_unmeasurable"])
    tree.add(9, opens=[tree.gpu(0)])
    assert check(tree)["reasons"] == ["holder"]


def test_coherent_memory_holds_the_systems_page_cache(tree: ProcTree) -> None:
    tree.nvml.set(0, used=20000, numa_node=1)
    result = check(tree)
    assert (result["verdict"], result["gpus"][0]["notes"]) == ("free", ["memory_unmeasurable"])


def test_utilization_is_information(tree: ProcTree) -> None:
    tree.nvml.set(0, utilization=100)
    result = check(tree)
    assert (result["verdict"], result["gpus"][0]["notes"]) == ("free", ["utilization"])


# C10


def test_holders_are_found_by_number_whatever_the_node_is_called(tree: ProcTree) -> None:
    guest = tree.node("ct/dev/nvidia0", 195, 0)
    gone = tree.node("gone", 195, 1)
    other = tree.node("ct/nvidia1", 1, 3)
    tree.add(31, comm="h1", opens=[guest])
    tree.add(32, comm="h2", opens=[gone])
    tree.add(33, comm="h3", opens=[other])
    result = check(tree)
    assert [row["pid"] for row in result["holders"]] == [31, 32]


def test_a_mapping_without_a_descriptor_is_a_holding(tree: ProcTree) -> None:
    tree.add(31, maps=[tree.gpu(0)])
    tree.add(32)
    tree.map(32, [tree.gpu(1)], deleted=True)
    result = check(tree)
    assert [row["pid"] for row in result["holders"]] == [31, 32]
    assert all(row["reason"].endswith("has it mapped") for row in result["holders"])


def test_a_node_of_an_earlier_boot_is_stale(tree: ProcTree) -> None:
    tree.node("nvidia-uvm", 508, 0)
    result = check(tree)
    assert (result["verdict"], result["reasons"]) == ("unknown", ["stale_device_node"])
    assert "508" in result["msg"]
    assert "510" in result["msg"]


def test_a_plain_file_among_real_nodes_is_stale(tree: ProcTree) -> None:
    tree.node("nvidia1", device=False)
    tree.numbers.pop((tree.gpu(1).stat().st_dev, tree.gpu(1).stat().st_ino), None)
    result = check(tree, expected_count=2)
    assert result["verdict"] == "unknown"
    assert "stale_device_node" in result["reasons"]


def test_mig_capability_nodes_belong_to_their_gpu(tree: ProcTree) -> None:
    folder = tree.proc / "driver/nvidia-caps"
    folder.mkdir(parents=True)
    (folder / "mig-minors").write_text("config 1\nmonitor 2\ngpu1/gi3/access 30\ngpu1/gi3/ci0/access 31\n")
    control, own = tree.node("nvidia-caps/nvidia-cap1", 511, 1), tree.node("nvidia-caps/nvidia-cap30", 511, 30)
    tree.add(40, comm="harmless", opens=[control])
    tree.add(41, comm="mig", opens=[own])
    result = check(tree)
    assert [row["pid"] for row in result["holders"]] == [41]
    assert [gpu["verdict"] for gpu in result["gpus"]] == ["free", "busy"]


# Neighbours


def test_an_open_node_of_another_gpu_is_no_use_of_it(tree: ProcTree) -> None:
    tree.add(70, opens=[tree.gpu(0), tree.gpu(1)], maps=[tree.gpu(1)], environ={"CUDA_VISIBLE_DEVICES": uuid(1)})
    result = check(tree, devices=["0"])
    assert (result["verdict"], result["notes"]) == ("free", ["open_only"])
    assert [row["pid"] for row in result["neighbours"]] == [70]
    assert check(tree)["gpus"][1]["verdict"] == "busy"


@pytest.mark.parametrize(
    ("value", "neighbour"),
    [
        ("1", True),
        (uuid(1), True),
        (uuid(1)[:-1] + "0," + uuid(1), False),
        ("0,1", False),
        ("", False),
        ("-1", False),
        ("7", False),
        ("nonsense", False),
        ("1,nonsense,0", True),
        (None, False),
        ("GPU-", False),
    ],
)
def test_only_a_variable_that_names_other_gpus_makes_a_neighbour(
    tree: ProcTree, value: str | None, neighbour: bool
) -> None:
    tree.add(70, opens=[tree.gpu(0)], environ={} if value is None else {"CUDA_VISIBLE_DEVICES": value})
    result = check(tree, devices=["0"])
    assert result["verdict"] == ("free" if neighbour else "busy")


def test_indices_among_different_models_establish_nothing(tree: ProcTree) -> None:
    tree.nvml.set(1, name="NVIDIA L4")
    tree.add(70, opens=[tree.gpu(0)], environ={"CUDA_VISIBLE_DEVICES": "1"})
    assert check(tree, devices=["0"])["verdict"] == "busy"
    tree.end(70)
    order = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    tree.add(70, opens=[tree.gpu(0)], environ=order)
    assert check(tree, devices=["0"])["verdict"] == "free"


def test_nvml_proves_use_against_any_variable(tree: ProcTree) -> None:
    tree.add(70, opens=[tree.gpu(0)], environ={"CUDA_VISIBLE_DEVICES": "1"})
    tree.nvml.set(0, processes=[(70, 3)])
    assert check(tree, devices=["0"])["reasons"] == ["holder"]


def test_memory_of_a_live_peer_is_blamed_on_it(tree: ProcTree) -> None:
    tree.add(
        71,
        comm="sglang::schedul",
        opens=[tree.gpu(0), tree.gpu(1)],
        maps=[tree.gpu(1)],
        environ={"CUDA_VISIBLE_DEVICES": "1"},
    )
    tree.nvml.set(0, used=771)
    result = check(tree, devices=["0"])
    assert result["verdict"] == "busy"
    assert "memory_no_owner" not in result["reasons"]
    assert result["details"][0]["pid"] == 71


# Completeness


def test_an_unreadable_process_makes_the_verdict_unknown_and_is_listed(tree: ProcTree) -> None:
    tree.add(80, comm="secret")
    tree.open(80, [tree.file("a"), tree.file("b")])
    tree.denied.add(str(tree.proc / "80/fd/3"))
    result = check(tree)
    assert (result["verdict"], result["reasons"]) == ("unknown", ["scan_incomplete"])
    assert result["scan"]["complete"] is False
    (row,) = result["scan"]["unreadable"]
    assert (row["pid"], row["reason"]) == (80, "1 of its 2 descriptors may not be looked at")


def test_gaps_that_stay_end_the_wait_and_gaps_that_change_do_not(tree: ProcTree) -> None:
    tree.add(80)
    tree.open(80, [tree.file("a")])
    tree.denied.add(str(tree.proc / "80/fd/3"))
    clock = FakeClock()
    result = check(tree, clock, timeout=30)
    assert result["reasons"] == ["scan_incomplete"]
    assert clock.time - 100 < 1

    def passes(number: int) -> None:
        tree.denied.clear()

    tree.nvml.before = passes
    assert check(tree, timeout=30)["verdict"] == "free"


def test_while_something_else_may_still_change_a_gap_does_not_end_the_wait(tree: ProcTree) -> None:
    tree.add(80)
    tree.open(80, [tree.file("a")])
    tree.denied.add(str(tree.proc / "80/fd/3"))
    tree.nvml.set(0, used=1000)
    clock = FakeClock()
    check(tree, clock, timeout=2)
    assert clock.time - 100 >= 2


def test_gpus_of_a_machine_that_cannot_be_seen_say_why(tree: ProcTree) -> None:
    tree.nvml.fault = fault_of(9, "Driver Not Loaded")
    assert [gpu["reasons"] for gpu in check(tree)["gpus"]] == [["nvml_unavailable"]] * 2


def test_what_nvml_lists_under_the_checks_own_pid_is_use(tree: ProcTree) -> None:
    tree.add(301, opens=[tree.gpu(0)])
    tree.nvml.set(0, used=1000, processes=[(301, 1000)])
    assert check(tree, self_pid=301)["reasons"] == ["holder"]


def test_on_stand_in_nodes_an_unreadable_process_is_listed_and_does_not_count(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path, gpus=1)
    tree.add(80, opens=[tree.file("a")])
    tree.denied.add(str(tree.proc / "80/fd/3"))
    result = check(tree)
    assert (result["verdict"], result["simulated"]) == ("free", True)
    assert result["scan"]["unreadable"][0]["pid"] == 80
    assert "simulated" in result["msg"]


def test_kernel_threads_and_processes_that_vanish_are_no_gaps(tree: ProcTree) -> None:
    folder = tree.add(2, comm="kthreadd", argv=[], flags=0x00208040)
    tree.denied.add(str(folder / "fd/3"))
    tree.open(2, [tree.gpu(0)])
    (tree.proc / "90").mkdir()
    assert check(tree)["verdict"] == "free"


def test_a_confined_look_at_real_nodes_is_never_free(tree: ProcTree) -> None:
    tree.add(90, uid=1001, opens=[tree.gpu(0)])
    clock = FakeClock()
    result = check(tree, clock, timeout=30, users=["1000"])
    assert (result["verdict"], result["reasons"], result["holders"]) == ("unknown", ["scan_incomplete"], [])
    assert clock.pauses == []
    assert [row["pid"] for row in check(tree, users=["1001"])["holders"]] == [90]


def test_a_confined_look_at_stand_in_nodes_may_be_free(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path, gpus=1)
    tree.add(90, uid=1001, opens=[tree.gpu(0)])
    assert check(tree, users=["1000"])["verdict"] == "free"


def test_what_nvml_lists_outside_the_users_is_foreign(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path, gpus=1)
    tree.add(90, uid=1001, opens=[tree.gpu(0)])
    tree.nvml.set(0, used=1000, processes=[(90, 1000)])
    assert check(tree, users=["1000"])["reasons"] == ["foreign_holder"]


def test_control_nodes_count_for_the_machine_and_for_no_single_gpu(tree: ProcTree) -> None:
    tree.add(95, opens=[tree.dev / "nvidiactl", tree.dev / "nvidia-uvm"])
    result = check(tree)
    assert (result["verdict"], result["reasons"]) == ("busy", ["holder"])
    assert [gpu["verdict"] for gpu in result["gpus"]] == ["free", "free"]
    assert check(tree, devices=["0"])["verdict"] == "free"


def test_a_look_without_nvml_keeps_what_its_last_answer_proved(tree: ProcTree) -> None:
    tree.add(70, opens=[tree.gpu(0)], environ={"CUDA_VISIBLE_DEVICES": "1"})
    tree.add(71, opens=[tree.gpu(1)])
    tree.nvml.set(0, processes=[(70, 3)])
    with tree.surveyor() as surveyor:
        first = surveyor.look()
        again = surveyor.look(nvml=False)
        tree.end(71)
        last = surveyor.look(nvml=False)
    assert tree.nvml.asked == 1
    assert first.holder_pids == again.holder_pids == {70, 71}
    assert last.holder_pids == {70}


# Self


def test_self_ancestors_and_children_never_count(tree: ProcTree) -> None:
    tree.add(300, comm="ansible-playboo", opens=[tree.gpu(0)])
    folder = tree.add(301, ppid=300, opens=[tree.gpu(0)])
    tree.add(302, ppid=301, opens=[tree.gpu(0)])
    (folder / "task/301/children").write_text("302 ")
    tree.nvml.child_pid = 303
    tree.add(303, ppid=301, opens=[tree.gpu(0)])
    result = check(tree, self_pid=301)
    assert result["verdict"] == "free"
    assert [row["pid"] for row in result["benign_holders"]] == [300]


# Waiting


def test_it_waits_for_the_memory_to_come_back(tree: ProcTree) -> None:
    tree.nvml.set(0, used=47900)

    def free_at_the_fifth(number: int) -> None:
        if number == 5:
            tree.nvml.set(0, used=0)

    tree.nvml.before = free_at_the_fifth
    clock = FakeClock()
    result = check(tree, clock, timeout=30)
    assert (result["verdict"], result["polls"]) == ("free", 6)
    # Memory follows its holder soon: looked at often, and the clean looks lie an interval apart.
    assert clock.pauses == [0.005] * 4 + [0.05]
    assert result["waited"] == pytest.approx(0.07)


def test_it_looks_less_often_when_the_memory_does_not_come_back(tree: ProcTree) -> None:
    tree.nvml.set(0, used=47900)
    clock = FakeClock()
    check(tree, clock, timeout=3)
    assert clock.pauses[0] == 0.005
    assert clock.pauses[-2] == 0.05
    assert len(clock.pauses) < 200 + 2 / 0.05 + 3


def test_the_interval_counts_from_the_beginning_of_a_look(tree: ProcTree) -> None:
    clock = FakeClock()

    def slow(number: int) -> None:
        clock.time += 0.03 if number == 1 else 0.2

    tree.nvml.before = slow
    check(tree, clock)
    assert clock.pauses == [pytest.approx(0.02)]
    clock.pauses.clear()
    tree.nvml.before = lambda number: slow(2)
    check(tree, clock)
    assert clock.pauses == [0.0]


def test_a_pause_ends_with_the_holder(dev: Path, tmp_path: Path) -> None:
    options = SurveyOptions(dev_dir=str(dev), state_dir=str(tmp_path))
    surveyor = Surveyor(options, nvml=FakeNvml(nvml_gpus(2)), pids=[], self_pid=0)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as holder:
        assert holder.stdin is not None
        threading.Timer(0.2, holder.stdin.close).start()
        began = time.monotonic()
        surveyor.pause(30.0, {holder.pid}, Clock())
        assert 0.1 < time.monotonic() - began < 20
        holder.wait()
    began = time.monotonic()
    surveyor.pause(30.0, {holder.pid}, Clock())
    assert time.monotonic() - began < 20


def test_while_somebody_holds_it_looks_once_an_interval(tree: ProcTree) -> None:
    tree.add(471, opens=[tree.gpu(0)], maps=[tree.gpu(0)])
    clock = FakeClock()

    def ends_at_the_third(number: int) -> None:
        if number == 3:
            tree.end(471)

    tree.nvml.before = ends_at_the_third
    result = check(tree, clock, timeout=30)
    # It had ended after the third look at the processes; two clean ones follow.
    assert (result["verdict"], result["polls"]) == ("free", 5)
    assert clock.pauses == [0.05, 0.05, 0.05, 0.05]


def test_a_holder_that_comes_back_starts_the_count_anew(tree: ProcTree) -> None:
    def flicker(number: int) -> None:
        tree.nvml.set(0, used=1000 if number == 2 else 0)

    tree.nvml.before = flicker
    result = check(tree, timeout=30)
    assert (result["verdict"], result["polls"]) == ("free", 4)


def test_it_gives_up_when_time_is_over(tree: ProcTree) -> None:
    tree.nvml.set(0, used=1000)
    clock = FakeClock()
    result = check(tree, clock, timeout=1)
    assert result["verdict"] == "busy"
    assert 1.0 <= clock.time - 100 <= 1.1


# Check mode


def test_the_prediction_leaves_out_who_would_have_ended_and_keeps_the_measurement(tree: ProcTree) -> None:
    tree.add(471, opens=[tree.gpu(0)], maps=[tree.gpu(0)])
    tree.add(472, opens=[tree.gpu(1)], maps=[tree.gpu(1)])
    tree.nvml.set(0, used=46700, processes=[(471, 46000)])
    tree.nvml.set(1, used=46000, processes=[(472, 46000)])
    with tree.surveyor() as surveyor:
        proof, predicted = predict_free(surveyor, FreeOptions(), {(471, 1471), (472, 1472)})
        assert (proof.verdict.verdict, predicted.verdict) == ("busy", "free")
        _proof, predicted = predict_free(surveyor, FreeOptions(), {(471, 1471)})
        assert predicted.verdict == "busy"
        assert [gpu.verdict for gpu in predicted.gpus] == ["free", "busy"]
        _proof, predicted = predict_free(surveyor, FreeOptions(), {(471, 9), (472, 1472)})
        assert predicted.verdict == "busy"


def test_the_prediction_takes_the_dead_parents_entry_with_the_child(tree: ProcTree) -> None:
    tree.add(471, opens=[tree.gpu(0)])
    tree.nvml.set(0, used=4622, processes=[(465, 4614)])
    with tree.surveyor() as surveyor:
        _proof, predicted = predict_free(surveyor, FreeOptions(), {(471, 1471)})
    assert predicted.verdict == "free"


def test_the_prediction_keeps_memory_that_is_nobodys(tree: ProcTree) -> None:
    tree.add(471, opens=[tree.gpu(0)])
    tree.nvml.set(0, used=30000, processes=[(471, 4614)])
    with tree.surveyor() as surveyor:
        _proof, predicted = predict_free(surveyor, FreeOptions(), {(471, 1471)})
    assert [reason.code for reason in predicted.reasons] == ["memory_no_owner"]


def test_check_mode_predicts_without_the_binding_that_it_does_not_place(tree: ProcTree) -> None:
    tree.add(471, opens=[tree.gpu(0)])
    tree.nvml.fault = missing_fault("/x")
    with tree.surveyor() as surveyor:
        proof, predicted = predict_free(surveyor, FreeOptions(), {(471, 1471)})
        assert proof.verdict.verdict == "busy"
        assert (predicted.verdict, [note.code for note in predicted.notes]) == ("free", ["binding_missing"])
        _proof, predicted = predict_free(surveyor, FreeOptions(), {(471, 1)})
        assert predicted.verdict == "busy"
    tree.end(471)
    with tree.surveyor() as surveyor:
        proof, _predicted = predict_free(surveyor, FreeOptions(), set())
    assert proof.verdict.verdict == "unknown"


# Bad input


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"devices": ["9"]}, "devices"),
        ({"devices": ["GPU-nothere"]}, "devices"),
        ({"devices": ["0000:ff:00.0"]}, "devices"),
        ({"devices": [""]}, "devices"),
        ({"users": ["nobody-of-this-name"]}, "users"),
        ({"containers": ["129"]}, "containers"),
        ({"nvml_timeout": 0.0}, "nvml_timeout"),
        ({"dev_dir": "/nonexistent-folder"}, "dev_dir"),
        ({"memory_threshold": 200 * 1024**3}, "memory_threshold"),
        ({"memory_threshold": -1}, "memory_threshold"),
        ({"expected_count": -1}, "expected_count"),
        ({"timeout": -1}, "timeout"),
    ],
)
def test_senseless_options_are_refused_by_name(tree: ProcTree, options: dict[str, Any], named: str) -> None:
    with pytest.raises(CleanslateError, match=r"^%s: " % named):
        check(tree, **options)


def test_assumptions_are_for_check_mode_alone() -> None:
    params = {"assume_ended": [], "memory_baseline": None, "expected_count": None, "memory_threshold": "128MiB"}
    with pytest.raises(CleanslateError, match=r"^assume_ended: "):
        check_free(params, check_mode=False)


@pytest.mark.parametrize("row", [{}, {"pid": 1}, {"pid": "x", "start_time": 2}])
def test_rows_without_identity_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(CleanslateError, match=r"^assume_ended: "):
        identities([row], "assume_ended")


# Selection


@pytest.mark.parametrize("name", ["1", uuid(1), uuid(1).upper(), "00000000:1A:00.0", "0000:1a:00.0", "1a:00.0"])
def test_gpus_are_chosen_by_index_uuid_or_pci_address(tree: ProcTree, name: str) -> None:
    assert [gpu["index"] for gpu in check(tree, devices=[name])["gpus"]] == [1]


def test_the_index_is_nvmls_and_not_the_nodes_number(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path, gpus=2, real=True)
    first, second = nvml_gpus(2)
    tree.nvml = FakeNvml([NvmlGpu(**{**second.__dict__, "index": 0}), NvmlGpu(**{**first.__dict__, "index": 1})])
    tree.add(5, opens=[tree.gpu(1)])
    result = check(tree, devices=["0"])
    assert (result["gpus"][0]["minor"], result["verdict"]) == (1, "busy")
    assert check(tree, devices=["1"])["verdict"] == "free"


def test_other_containers_holders_still_stand_against_free(tree: ProcTree) -> None:
    tree.add(5, cgroup="/lxc/129/ns/system.slice/a.service", opens=[tree.gpu(0)])
    tree.add(6, cgroup="/lxc/130/ns/init.scope", opens=[tree.gpu(1)])
    assert check(tree, containers=["lxc/129"])["reasons"] == ["holder", "foreign_holder"]
    result = check(tree, containers=["129"])
    assert [(row["pid"], row["container"]) for row in result["holders"]] == [(5, "lxc/129"), (6, "lxc/130")]
    assert result["reasons"] == ["holder", "foreign_holder"]


def test_an_instances_own_gpus_make_it_a_neighbour_of_others(tree: ProcTree) -> None:
    record = InstanceRecord(name="other", backend="systemd", gpus=[uuid(1)], cgroup="/system.slice/x.service")
    RecordStore(str(tree.state)).save(record)
    tree.add(5, cgroup="/system.slice/x.service", opens=[tree.gpu(0), tree.gpu(1)])
    result = check(tree, devices=["0"])
    assert (result["verdict"], result["notes"]) == ("free", ["open_only"])
    assert check(tree, devices=["1"])["verdict"] == "busy"


def test_hostile_names_reach_nobody_raw(tree: ProcTree) -> None:
    tree.add(5, comm="a) b\n\x1b[2J", argv=["\x1b]0;x\x07", "\udcff\n"], opens=[tree.gpu(0)])
    result = check(tree)
    assert all(char.isprintable() for char in result["msg"])
    (row,) = result["holders"]
    assert all(char.isprintable() for char in row["comm"] + row["cmdline"])


def test_judging_twice_gives_the_same(tree: ProcTree) -> None:
    tree.add(5, opens=[tree.gpu(0)])
    with tree.surveyor() as surveyor:
        survey = surveyor.look()
    assert judge(survey, Limits()).data() == judge(survey, Limits()).data()
