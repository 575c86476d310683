# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The stand-in NVML: what it tells follows from who holds the nodes, and it fails in each way that a driver fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

UUID = "GPU-fa4e0000-0000-4000-8000-0000000000{:02x}"


def users(survey: list[dict[str, Any]]) -> list[list[int]]:
    return [[process["pid"] for process in gpu["processes"]] for gpu in survey]


def used(survey: list[dict[str, Any]]) -> list[int]:
    return [gpu["v2"] for gpu in survey]


# -- Who uses a GPU ----------------------------------------------------------------------------------------------------


def test_a_mapped_node_is_use_and_an_open_one_is_not(nvml, hold) -> None:
    holder = hold(maps=(1,), opens=(0, 1, 2, 3))
    survey = nvml()
    assert users(survey) == [[], [holder.pid], [], []]
    assert used(survey) == [0, 1024, 0, 0]
    assert [gpu["utilization"] for gpu in survey] == [0, 100, 0, 0]


def test_memory_comes_back_when_the_holder_ends(nvml, hold) -> None:
    holder = hold(maps=(0, 2), FAKE_GPU_MIB="43674")
    ask = nvml.session()
    assert used(ask()) == [43674, 0, 43674, 0]
    holder.kill()
    holder.wait()
    after = ask()
    assert used(after) == [0, 0, 0, 0] and users(after) == [[], [], [], []]


def test_without_a_mapping_the_variable_decides_for_plain_files(nvml, hold) -> None:
    expected = {
        "0,2": [0, 2],
        UUID.format(3): [3],
        UUID.format(1) + ", 3": [1, 3],
        UUID.format(1)[:-1]: [0, 1, 2, 3],  # a beginning that all share
        "": [],
        "9": [],
        None: [],
    }
    holders = {
        hold(opens=(0, 1, 2, 3), **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})).pid: gpus
        for visible, gpus in expected.items()
    }
    survey = users(nvml())
    assert {pid: [gpu for gpu, pids in enumerate(survey) if pid in pids] for pid in holders} == holders


def test_a_mapping_outweighs_the_variable(nvml, hold) -> None:
    hold(maps=(1,), opens=(0, 1), CUDA_VISIBLE_DEVICES="0,1")
    assert used(nvml()) == [0, 1024, 0, 0]


def test_a_character_device_that_cannot_be_mapped_counts_when_open(nvml, hold, dev: Path) -> None:
    master, slave = os.openpty()
    other_master, other_slave = os.openpty()
    for number, terminal in ((0, slave), (1, other_slave)):
        (dev / f"nvidia{number}").unlink()
        (dev / f"nvidia{number}").symlink_to(os.ttyname(terminal))
    os.close(slave)
    os.close(other_slave)
    try:
        plain, chosen = hold(opens=(0,)), hold(opens=(0, 1), CUDA_VISIBLE_DEVICES=UUID.format(1))
        # Terminals of other containers have the same device numbers: only ours are looked at.
        first, second = (set(pids) & {plain.pid, chosen.pid} for pids in users(nvml())[:2])
        assert (first, second) == ({plain.pid}, {chosen.pid})
    finally:
        os.close(master)
        os.close(other_master)


def test_an_unlisted_holder_takes_a_little_memory(nvml, hold) -> None:
    hold(maps=(0,), FAKE_GPU_LISTED="0")
    hold(maps=(0,), FAKE_GPU_LISTED="0", FAKE_GPU_MIB="2")
    survey = nvml()
    assert used(survey)[0] == 3 and users(survey)[0] == []


def test_the_threads_of_a_zombie_still_hold(nvml, hold) -> None:
    holder = hold(maps=(0,), thread=True)
    deadline = time.monotonic() + 5
    while f"{Path(f'/proc/{holder.pid}/stat').read_text().rsplit(')')[1].split()[0]}" != "Z":
        assert time.monotonic() < deadline
    survey = nvml()
    assert users(survey)[0] == [holder.pid] and used(survey)[0] == 1024


def test_the_caller_holds_the_nodes_and_does_not_count(nvml, dev: Path) -> None:
    ask = nvml.session()
    assert used(ask()) == [0, 0, 0, 0]
    descriptors = [os.readlink(entry) for entry in Path(f"/proc/{nvml.process.pid}/fd").iterdir()]
    assert str(dev / "nvidia3") in descriptors and str(dev / "nvidiactl") in descriptors
    assert used(nvml()) == [0, 0, 0, 0]  # nor does it for another caller


# -- Memory ------------------------------------------------------------------------------------------------------------


def test_v1_counts_the_reserved_part_as_used(nvml, hold) -> None:
    hold(maps=(0,))
    first, second = nvml()[:2]
    assert (first["v1"], first["v2"], first["v2_used"]) == (1024 + 615, 1024, 1024)
    assert (second["v1"], second["v2"], second["total"]) == (615, 0, 143771)


def test_an_old_driver_counts_it_in_v2_too(nvml) -> None:
    first = nvml(V2_RESERVED_USED=1)[0]
    assert (first["v2_used"], first["v2"]) == (615, 0)


def test_a_driver_without_v2(nvml) -> None:
    first = nvml(NO_V2=1)[0]
    assert first["v2"]["error"] == 13 and first["v1"] == 615


def test_memory_not_supported_on_one_gpu(nvml) -> None:
    survey = nvml(MEMORY_NA="1@2")
    assert survey[2]["v2"]["error"] == survey[2]["v1"]["error"] == 3
    assert survey[1]["v2"] == 0


def test_a_total_of_zero(nvml) -> None:
    assert nvml(TOTAL_MIB=0)[0]["total"] == 0


def test_memory_without_an_owner(nvml) -> None:
    survey = nvml(UNOWNED_MIB="500@1,3")
    assert used(survey) == [0, 500, 0, 500] and users(survey) == [[], [], [], []]


def test_memory_lags_its_holder(nvml, hold, tmp_path: Path) -> None:
    holder = hold(maps=(0,))
    ask = nvml.session(LAG_MS=400, STATE_DIR=tmp_path)
    assert used(ask())[0] == 1024
    holder.kill()
    holder.wait()
    ended = time.monotonic()
    late = ask()
    assert used(late)[0] == 1024 and users(late)[0] == [holder.pid]
    # Another process knows it too: the state is in a file.
    assert used(nvml(LAG_MS=400, STATE_DIR=tmp_path))[0] == 1024 or time.monotonic() - ended > 0.4
    while used(ask())[0]:
        assert time.monotonic() < ended + 5
    assert time.monotonic() - ended >= 0.39
    assert users(ask())[0] == []


def test_a_live_peer_keeps_its_context_on_a_dead_ranks_gpu(nvml, hold) -> None:
    ranks = [hold(maps=(rank,), opens=(0, 1, 2, 3), CUDA_VISIBLE_DEVICES="0,1") for rank in (0, 1)]
    ask = nvml.session(PEER_MIB=771)
    assert used(ask()) == [1795, 1795, 0, 0]
    ranks[1].kill()
    ranks[1].wait()
    after = ask()
    assert used(after) == [1024, 771, 0, 0] and users(after)[1] == []
    ranks[0].kill()
    ranks[0].wait()
    assert used(ask()) == [0, 0, 0, 0]


# -- Process lists -----------------------------------------------------------------------------------------------------


def test_garbage_pids(nvml) -> None:
    survey = nvml(EXTRA_PIDS="0,4294967295@1")
    assert users(survey) == [[], [0, 4294967295], [], []]


def test_a_dead_owner_is_listed_for_its_heir(nvml, hold) -> None:
    hold(maps=(0,))
    survey = nvml(DEAD_OWNER=4194301)
    assert users(survey) == [[4194301], [], [], []] and used(survey)[0] == 1024


def test_per_process_memory_not_available(nvml, hold) -> None:
    hold(maps=(0,))
    assert nvml(PROC_MEM_NA=1)[0]["processes"][0]["mib"] is None


MAP = "import mmap,time; f=open(%r,'r+b'); m=mmap.mmap(f.fileno(),4096); print(1,flush=True); time.sleep(60)"
GUEST = 'mount --rbind "$1" "$2" && mount -t proc proc /proc && "$3" -c "$4" | { shift 4; read _; exec "$@"; }'


@pytest.mark.parametrize(
    ("driver", "own", "memory", "others"),
    [("525.60.13", "host", 1024, True), ("550.54.15", "guest", 0, False), ("570.86.15", "guest", 1024, False)],
)
def test_generations_of_drivers_in_a_guest(nvml, hold, dev, tmp_path, guest, driver, own, memory, others) -> None:
    """Before 535.113 host PIDs of everybody; then the caller's own only, at first without their memory."""
    outside = hold(maps=(0,))
    survey = nvml(guest(dev / "nvidia0"), DRIVER=driver, PROC=tmp_path / "hostproc")
    assert used(survey)[0] == 2048  # memory is the device's, whoever holds it
    rows = {row["pid"]: row["mib"] for row in survey[0]["processes"]}
    assert (outside.pid in rows) is others
    inside = [pid for pid in rows if pid != outside.pid]
    assert len(inside) == 1 and rows[inside[0]] == memory
    assert (inside[0] < 50) is (own == "guest")


def test_the_host_sees_its_guests(nvml, started, dev, tmp_path, guest) -> None:
    started.start(*guest(dev / "nvidia1"), "cat", stdin=subprocess.PIPE)
    ask = nvml.session()
    deadline = time.monotonic() + 10
    while not (survey := ask())[1]["processes"]:
        assert time.monotonic() < deadline
    assert used(survey) == [0, 1024, 0, 0] and survey[1]["processes"][0]["pid"] > 50


@pytest.fixture
def guest(tmp_path: Path):
    """Words that run a command in a PID namespace, next to a process that has the node mapped there."""
    (tmp_path / "hostproc").mkdir()
    own_root = () if os.geteuid() == 0 else ("--user", "--map-root-user")

    def wrap(node: Path) -> tuple[str, ...]:
        words = ("/proc", str(tmp_path / "hostproc"), sys.executable, MAP % str(node))
        return ("unshare", *own_root, "--pid", "--fork", "--kill-child", "--mount", "sh", "-c", GUEST, "sh", *words)

    words = ["unshare", *own_root, "--pid", "--fork", "--mount", "mount", "-t", "proc", "proc", "/proc"]
    probe = subprocess.run(words, check=False, capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"this user may not make a PID namespace: {probe.stderr.strip()}")
    return wrap


# -- Devices -----------------------------------------------------------------------------------------------------------


def test_the_index_is_not_the_minor(nvml, hold) -> None:
    holder = hold(maps=(3,))
    by_index = hold(opens=(0, 1, 2, 3), CUDA_VISIBLE_DEVICES="1")
    survey = nvml(ORDER="3,2,1,0")
    assert [gpu["minor"] for gpu in survey] == [3, 2, 1, 0]
    assert [gpu["uuid"] for gpu in survey] == [UUID.format(minor) for minor in (3, 2, 1, 0)]
    assert [gpu["pci"] for gpu in survey] == [f"00000000:{0x19 + i:02X}:00.0" for i in range(4)]
    assert users(survey) == [[holder.pid], [by_index.pid], [], []]


def test_fewer_and_more_gpus_than_nodes(nvml) -> None:
    assert [gpu["minor"] for gpu in nvml(COUNT=2)] == [0, 1]
    assert [gpu["minor"] for gpu in nvml(COUNT=6)] == [0, 1, 2, 3, 4, 5]
    assert nvml(COUNT=0) == []
    assert [gpu["minor"] for gpu in nvml(HIDE="1,2")] == [0, 3]


def test_a_node_without_permission_is_no_gpu(nvml, dev: Path) -> None:
    (dev / "nvidia1").unlink()
    (dev / "nvidia1").mkdir()
    assert [gpu["minor"] for gpu in nvml()] == [0, 2, 3]


def test_mig_devices_have_their_own_lists(nvml, hold, dev: Path) -> None:
    caps = dev / "nvidia-caps"
    caps.mkdir()
    for instance in (1, 2):
        (caps / f"nvidia-cap{3 + 135 * 2 + 9 * instance}").write_bytes(b"")
    by_name = hold(opens=(2,), CUDA_VISIBLE_DEVICES="MIG-fa4e0000-0000-4000-8000-000000000201")
    by_node = hold(maps=(2,), opens=(f"nvidia-caps/nvidia-cap{3 + 135 * 2 + 18}",), FAKE_GPU_MIB="300")
    survey = nvml(MIG="2:2")
    assert [len(gpu["mig"]) for gpu in survey] == [0, 0, 2, 0]
    first, second = survey[2]["mig"]
    assert (first["v2"], second["v2"], used(survey)[2]) == (1024, 300, 1324)
    assert users([first, second]) == [[by_name.pid], [by_node.pid]]
    assert (first["instance"], second["instance"], first["total"]) == (1, 2, 143771 // 2)
    assert survey[2]["utilization"]["error"] == 3


STATIC = """
import pynvml as nvml
nvml.nvmlInit()
handle = nvml.nvmlDeviceGetHandleByUUID("GPU-fa4e0000-0000-4000-8000-000000000002")
other = nvml.nvmlDeviceGetHandleByPciBusId("0000:1B:00.0")
print(nvml.nvmlSystemGetDriverVersion(), nvml.nvmlDeviceGetName(handle))
print(nvml.nvmlDeviceGetIndex(handle), nvml.nvmlDeviceGetIndex(other), nvml.nvmlDeviceGetPciInfo(handle).busId)
print(nvml.nvmlDeviceGetPersistenceMode(handle), nvml.nvmlDeviceGetComputeMode(handle))
print(nvml.nvmlDeviceGetGraphicsRunningProcesses(handle), nvml.nvmlDeviceGetMPSComputeRunningProcesses(handle))
for call in (nvml.nvmlDeviceGetRemappedRows, nvml.nvmlDeviceGetRetiredPagesPendingStatus):
    try:
        call(handle)
    except nvml.NVMLError_NotSupported:
        print("not supported")
nvml.nvmlShutdown()
try:
    nvml.nvmlDeviceGetCount()
except nvml.NVMLError_Uninitialized:
    print("uninitialized")
"""


def test_the_rest_of_the_interface(nvml) -> None:
    settings = {"FAKE_NVML_PERSISTENCE": "0", "FAKE_NVML_COMPUTE_MODE": "3", "FAKE_NVML_DRIVER": "550.54.15"}
    words = [sys.executable, "-c", STATIC]
    done = subprocess.run(words, env={**nvml.environment, **settings}, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "550.54.15 NVIDIA H200",
        "2 2 00000000:1B:00.0",
        "0 3",
        "[] []",
        "not supported",
        "not supported",
        "uninitialized",
    ]


def test_a_recovery_action_is_told(nvml) -> None:
    assert [gpu["recovery"] for gpu in nvml(RECOVERY_ACTION="1@2")] == [0, 0, 1, 0]


# -- Failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [9, 18, 999])
def test_init_fails(nvml, code) -> None:
    assert nvml(INIT_ERROR=code)["error"] == code


@pytest.mark.parametrize("where", ["init", "query", "processes"])
def test_a_call_hangs(nvml, where) -> None:
    ask = nvml.session(HANG=where)
    with pytest.raises(TimeoutError):
        ask(timeout=0.5)
    assert nvml.process.poll() is None


def test_a_lost_gpu(nvml) -> None:
    survey = nvml(LOST=3, LOST_AT="handle")
    assert survey[3]["error"] == 15 and survey[2]["v2"] == 0


def test_a_gpu_lost_at_the_query(nvml) -> None:
    ask = nvml.session(LOST=3)
    with pytest.raises(AssertionError, match="GPU is lost"):
        ask()


def test_any_call_can_fail_on_one_gpu(nvml) -> None:
    survey = nvml(FAIL="processes:999@1 memory:16@2")
    assert survey[1]["processes"]["error"] == 999 and survey[1]["v2"] == 0
    assert survey[2]["v1"]["error"] == 16 and survey[2]["processes"] == []


def test_settings_come_from_a_file_too(nvml, tmp_path: Path) -> None:
    settings = tmp_path / "settings"
    settings.write_text("COUNT=1\nUNOWNED_MIB=7@0\n")
    nvml.environment["FAKE_NVML_CONF"] = str(settings)
    ask = nvml.session()
    assert used(ask()) == [7]
    settings.write_text("UNOWNED_MIB=9\n")
    assert used(ask()) == [9]  # read at every call
    assert used(nvml(UNOWNED_MIB=1)) == [1, 1, 1, 1]  # the environment wins
