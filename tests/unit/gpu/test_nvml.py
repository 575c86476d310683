# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""NVML behind a deadline: what is asked, what an error means, and that nothing of it can hang or stay."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.nvml import (
    fault_of,
    missing_fault,
    snapshot_of,
    timeout_fault,
)
from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.nvml_queries import Failed, Queries

MIB = 1024**2


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__("error %d" % value)
        self.value = value


class Binding:
    """nvidia-ml-py as far as it is asked. C(answers) replaces single calls: a value, or an error to raise."""

    NVMLError = NVMLError
    nvmlMemory_v2 = 0x02000028

    def __init__(self, gpus: int = 1, **answers: Any) -> None:
        self.gpus = gpus
        self.answers = answers
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls.append(name)
            if name in self.answers:
                answer = self.answers[name]
                answer = answer(*arguments, **options) if callable(answer) else answer
            else:
                answer = self.default(name, *arguments, **options)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    def default(self, name: str, *arguments: Any, **options: Any) -> Any:
        if name == "nvmlDeviceGetMemoryInfo":
            if "version" in options:
                return SimpleNamespace(total=1000 * MIB, free=385 * MIB, reserved=615 * MIB, used=615 * MIB)
            return SimpleNamespace(total=1000 * MIB, free=385 * MIB, used=615 * MIB)
        if name.endswith("RunningProcesses"):
            return []
        return {
            "nvmlDeviceGetCount": self.gpus,
            "nvmlDeviceGetHandleByIndex": arguments[0] if arguments else None,
            "nvmlSystemGetDriverVersion": b"580.159.04",
            "nvmlSystemGetNVMLVersion": "13.580",
            "nvmlSystemGetCudaDriverVersion": 13010,
            "nvmlDeviceGetUUID": "GPU-1",
            "nvmlDeviceGetMinorNumber": 4,
            "nvmlDeviceGetName": "NVIDIA H200",
            "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:1B:00.0"),
            "nvmlDeviceGetPersistenceMode": 0,
            "nvmlDeviceGetComputeMode": 0,
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=7, memory=0),
            "nvmlDeviceGetFieldValues": [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=0))],
        }.get(name, NVMLError(3))


def ask(**answers: Any) -> Any:
    """The snapshot behind a binding."""
    return snapshot_of(Queries(Binding(**answers)).everything())


def test_everything_that_is_asked_arrives() -> None:
    snapshot = ask()
    (gpu,) = snapshot.gpus
    assert (snapshot.driver, snapshot.library, snapshot.cuda) == ("580.159.04", "13.580", "13.1")
    assert (gpu.uuid, gpu.pci, gpu.minor, gpu.name) == ("GPU-1", "00000000:1B:00.0", 4, "NVIDIA H200")
    assert (gpu.persistence, gpu.compute_mode, gpu.utilization, gpu.recovery_action) == (False, 0, 7, "none")
    assert (gpu.mig, gpu.numa_node, gpu.error) == (None, None, None)


def test_used_memory_is_without_what_the_driver_reserves_whatever_it_calls_used() -> None:
    (gpu,) = ask().gpus
    assert (gpu.memory_version, gpu.memory_used, gpu.memory_reserved) == (2, 0, 615 * MIB)


@pytest.mark.parametrize("code", [13, 25])
def test_an_older_driver_knows_memory_of_version_1(code: int) -> None:
    def memory(_handle: Any, version: int | None = None) -> Any:
        return NVMLError(code) if version else SimpleNamespace(total=1000 * MIB, free=385 * MIB, used=615 * MIB)

    (gpu,) = ask(nvmlDeviceGetMemoryInfo=memory).gpus
    assert (gpu.memory_version, gpu.memory_used, gpu.memory_reserved) == (1, 615 * MIB, None)


def test_an_older_binding_without_versions_is_asked_the_old_way() -> None:
    def memory(_handle: Any) -> Any:
        return SimpleNamespace(total=1000 * MIB, free=385 * MIB, used=615 * MIB)

    assert ask(nvmlDeviceGetMemoryInfo=memory).gpus[0].memory_version == 1


@pytest.mark.parametrize(
    "memory", [NVMLError(3), lambda _handle, version=None: SimpleNamespace(total=0, free=0, reserved=0, used=0)]
)
def test_memory_that_is_not_supported_or_totals_nothing_cannot_be_measured(memory: Any) -> None:
    (gpu,) = ask(nvmlDeviceGetMemoryInfo=memory).gpus
    assert (gpu.memory_used, gpu.memory_total, gpu.error) == (None, None, None)


def test_all_three_lists_of_processes_are_asked() -> None:
    def entry(pid: int, memory: int | None) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=memory)]

    (gpu,) = ask(
        nvmlDeviceGetComputeRunningProcesses=entry(10, 5),
        nvmlDeviceGetGraphicsRunningProcesses=entry(11, None),
        nvmlDeviceGetMPSComputeRunningProcesses=entry(12, (1 << 64) - 1),
    ).gpus
    found = [(process.pid, process.kind, process.memory) for process in gpu.processes]
    assert found == [(10, "compute", 5), (11, "graphics", None), (12, "mps", None)]


def test_a_list_that_cannot_be_read_is_an_error_and_one_that_does_not_exist_is_none() -> None:
    assert ask(nvmlDeviceGetMPSComputeRunningProcesses=NVMLError(13)).gpus[0].error is None
    error = ask(nvmlDeviceGetGraphicsRunningProcesses=NVMLError(999)).gpus[0].error
    assert error is not None
    assert error.code == 999


def test_one_failing_gpu_leaves_the_others() -> None:
    snapshot = ask(gpus=3, nvmlDeviceGetHandleByIndex=lambda index: NVMLError(15) if index == 1 else index)
    assert [gpu.error.reason if gpu.error else "" for gpu in snapshot.gpus] == ["", "gpu_lost", ""]
    assert [gpu.index for gpu in snapshot.gpus] == [0, 1, 2]


def test_processes_of_mig_devices_join_those_of_their_gpu() -> None:
    def processes(handle: Any) -> Any:
        return [SimpleNamespace(pid=1000 + handle, usedGpuMemory=1)] if handle in (50, 51) else []

    (gpu,) = ask(
        nvmlDeviceGetMigMode=[1, 1],
        nvmlDeviceGetMaxMigDeviceCount=3,
        nvmlDeviceGetMigDeviceHandleByIndex=lambda _gpu, number: 50 + number if number < 2 else NVMLError(6),
        nvmlDeviceGetGpuInstanceId=lambda device: device - 49,
        nvmlDeviceGetUUID=lambda handle: "MIG-%s" % handle if handle else "GPU-1",
        nvmlDeviceGetComputeRunningProcesses=processes,
    ).gpus
    assert gpu.mig == ({"uuid": "MIG-50", "gpu_instance": 1}, {"uuid": "MIG-51", "gpu_instance": 2})
    assert [process.pid for process in gpu.processes] == [1050, 1051]


def test_the_action_that_the_driver_asks_for_is_read() -> None:
    def field(number: int, status: int = 0) -> list[Any]:
        return [SimpleNamespace(nvmlReturn=status, value=SimpleNamespace(uiVal=number))]

    assert ask(nvmlDeviceGetFieldValues=field(4)).gpus[0].recovery_action == "drain and reset the GPU"
    assert ask(nvmlDeviceGetFieldValues=field(99)).gpus[0].recovery_action == "number 99"
    assert ask(nvmlDeviceGetFieldValues=field(1, status=3)).gpus[0].recovery_action == ""


def test_a_machine_without_gpus_has_none() -> None:
    assert ask(nvmlDeviceGetCount=NVMLError(28)).gpus == ()
    with pytest.raises(Failed):
        ask(nvmlDeviceGetCount=NVMLError(999))


def test_an_old_binding_is_initialised_the_old_way() -> None:
    binding = Binding(nvmlInit=None, nvmlInitWithFlags=TypeError("no flags"))
    Queries(binding).start()
    assert binding.calls == ["nvmlInitWithFlags", "nvmlInit"]


def test_every_error_has_a_reason_a_meaning_and_advice() -> None:
    reasons = {}
    for code in (4, 9, 10, 12, 15, 16, 17, 18, 27, 28, 999, 1234):
        fault = fault_of(code, "text")
        assert fault.advice
        assert str(code) in fault.message
        reasons[code] = fault.reason
    assert reasons[15] == "gpu_lost"
    assert reasons[16] == "reset_required"
    assert reasons[18] == "version_mismatch"
    assert reasons[10] == timeout_fault(1).reason == "nvml_timeout"
    assert missing_fault("/x").reason == "binding_missing"
    assert len({fault_of(code, "").message for code in (9, 12, 17, 999)}) == 4


def test_text_of_the_driver_is_printable() -> None:
    assert fault_of(999, "a\x1b[2Jb\n").message.isprintable()


SESSION = """
import json, os, sys, time
from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.nvml import NvmlSession
started = time.monotonic()
with NvmlSession(sys.argv[1], float(sys.argv[2])) as session:
    first = session.snapshot()
    again = session.snapshot()
    child = session.child_pid
    others = [] if not child else [
        os.readlink("/proc/%d/fd/%s" % (child, fd)) for fd in os.listdir("/proc/%d/fd" % child)
    ]
    name = open("/proc/%d/comm" % child).read().strip() if child else ""
print(json.dumps({
    "ok": first.ok, "again": again.ok, "reason": first.reason, "again_reason": again.reason, "advice": first.advice,
    "binding": first.binding, "uuids": [gpu.uuid for gpu in first.gpus], "minors": [gpu.minor for gpu in first.gpus],
    "used": [gpu.memory_used for gpu in first.gpus], "name": name, "fds": others,
    "errors": [gpu.error.reason if gpu.error else "" for gpu in first.gpus],
    "seconds": time.monotonic() - started,
    "left": [pid for pid in open("/proc/self/task/%d/children" % os.getpid()).read().split()],
}))
"""


def test_the_stand_in_library_is_asked_through_nvidia_ml_py(python: Callable[..., Any]) -> None:
    found = python(SESSION, "/nowhere", 20, ORDER="1,0")
    assert (found["ok"], found["again"], found["binding"]) == (True, True, "interpreter")
    assert found["minors"] == [1, 0]
    assert found["uuids"][0].endswith("01")
    assert found["used"] == [0, 0]


def test_the_child_has_nothing_of_its_parents_and_is_gone_at_the_end(python: Callable[..., Any]) -> None:
    found = python(SESSION, "/nowhere", 20)
    assert found["name"] == "cleanslate-nvml"
    assert all(path == os.devnull or path.startswith("pipe:") for path in found["fds"][:3])
    assert len([path for path in found["fds"] if path.startswith("pipe:")]) == 2
    assert found["left"] == []


@pytest.mark.parametrize("hang", ["init", "query"])
def test_a_driver_that_never_answers_is_given_up(python: Callable[..., Any], hang: str) -> None:
    started = time.monotonic()
    found = python(SESSION, "/nowhere", 1, HANG=hang)
    assert (found["reason"], found["again_reason"]) == ("nvml_timeout", "nvml_timeout")
    assert 1 <= found["seconds"] < 4
    assert time.monotonic() - started < 20
    assert found["left"] == []


@pytest.mark.parametrize(("code", "reason"), [(9, "nvml_unavailable"), (18, "version_mismatch")])
def test_a_driver_that_refuses_is_named(python: Callable[..., Any], code: int, reason: str) -> None:
    found = python(SESSION, "/nowhere", 20, INIT_ERROR=code)
    assert (found["ok"], found["reason"]) == (False, reason)
    assert found["advice"]


def test_a_lost_gpu_is_one_gpus_matter(python: Callable[..., Any]) -> None:
    assert python(SESSION, "/nowhere", 20, LOST=1, LOST_AT="handle")["errors"] == ["", "gpu_lost"]


CRASH = """
import json, sys, os
sys.path.insert(0, sys.argv[1])
from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.nvml import NvmlSession
with NvmlSession("/nowhere", 20) as session:
    print(json.dumps(session.snapshot().reason))
"""


@pytest.mark.parametrize("body", ["import os; os.abort()", "raise ValueError('broken package')"])
def test_a_binding_that_crashes_takes_only_the_child(python: Callable[..., Any], tmp_path: Any, body: str) -> None:
    (tmp_path / "pynvml.py").write_text(body, encoding="utf-8")
    assert python(CRASH, tmp_path) == "nvml_unavailable"


MISSING = """
import json, sys
sys.path = [path for path in sys.path if "site-packages" not in path]
from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.nvml import NvmlSession
with NvmlSession(sys.argv[1], 20) as session:
    snapshot = session.snapshot()
print(json.dumps([snapshot.reason, snapshot.binding, sys.argv[1] in sys.path]))
"""


def test_without_a_binding_that_is_said_and_a_placed_one_is_found(python: Callable[..., Any], tmp_path: Any) -> None:
    import pynvml

    assert python(MISSING, tmp_path) == ["binding_missing", "", False]
    (tmp_path / "pynvml.py").write_bytes(Path(pynvml.__file__).read_bytes())
    assert python(MISSING, tmp_path) == ["", "pynvml_path", False]
