# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""What is asked of NVML: runs in the session's child process, returns plain data.

C(pynvml) is nvidia-ml-py. An error of one GPU never stops the others (each failure becomes data).
"""

from __future__ import annotations

import typing as t

# nvml.h: nvmlReturn_t
NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH = 3, 4, 13, 25
GPU_NOT_FOUND = 28
UNKNOWN = 999
#: Init although no GPU is there: none is an answer, not an error.
INIT_FLAG_NO_GPUS = 1
#: nvml.h: NVML_FI_DEV_GET_GPU_RECOVERY_ACTION and its values.
FIELD_RECOVERY_ACTION = 230
RECOVERY_ACTIONS = {
    0: "none",
    1: "reset the GPU",
    2: "reboot the node",
    3: "drain peer-to-peer traffic",
    4: "drain and reset the GPU",
    5: "recover the IMEX domain",
    6: "reset the bus",
    7: "reboot the system",
}
_LISTS = (
    ("compute", "nvmlDeviceGetComputeRunningProcesses"),
    ("graphics", "nvmlDeviceGetGraphicsRunningProcesses"),
    ("mps", "nvmlDeviceGetMPSComputeRunningProcesses"),
)
#: What NVML says where a number is missing (nvml.h: NVML_VALUE_NOT_AVAILABLE).
_NOT_AVAILABLE = (1 << 64) - 1

Data = dict[str, t.Any]


class Failed(Exception):
    """One call failed: nvmlReturn_t and its text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text

    def data(self) -> Data:
        return {"code": self.code, "text": self.text}


class Queries:
    """All questions, over one binding."""

    def __init__(self, pynvml: t.Any) -> None:
        self._nvml = pynvml

    def call(self, name: str, *arguments: t.Any, **options: t.Any) -> t.Any:
        """One call of the binding. Raises Failed; a call that this binding lacks fails as NVML would say it."""
        function = getattr(self._nvml, name, None)
        if function is None:
            raise Failed(FUNCTION_NOT_FOUND, "the binding has no " + name)
        try:
            return function(*arguments, **options)
        except self._nvml.NVMLError as error:
            code = getattr(error, "value", UNKNOWN)
            raise Failed(int(code), str(error)) from None
        except TypeError as error:  # an older binding that does not know an option
            raise Failed(FUNCTION_NOT_FOUND, str(error)) from None

    def maybe(self, name: str, *arguments: t.Any) -> t.Any:
        """Like call; None where that fails, for what is only information."""
        try:
            return self.call(name, *arguments)
        except Failed:
            return None

    def start(self) -> None:
        """Initialise NVML. Raises Failed."""
        try:
            self.call("nvmlInitWithFlags", INIT_FLAG_NO_GPUS)
        except Failed as error:
            if error.code != FUNCTION_NOT_FOUND:
                raise
            self.call("nvmlInit")

    def everything(self) -> Data:
        """The whole answer. Raises Failed when the machine as a whole cannot be asked."""
        try:
            count = self.call("nvmlDeviceGetCount")
        except Failed as error:
            if error.code != GPU_NOT_FOUND:
                raise
            count = 0
        cuda = self.maybe("nvmlSystemGetCudaDriverVersion")
        return {
            "driver": _text(self.maybe("nvmlSystemGetDriverVersion")),
            "library": _text(self.maybe("nvmlSystemGetNVMLVersion")),
            "cuda": "%d.%d" % (cuda // 1000, cuda % 1000 // 10) if cuda else "",
            "gpus": [self.gpu(index) for index in range(count)],
        }

    def gpu(self, index: int) -> Data:
        out: Data = {"index": index}
        try:
            handle = self.call("nvmlDeviceGetHandleByIndex", index)
        except Failed as error:
            out["error"] = error.data()
            return out
        out["uuid"] = _text(self.maybe("nvmlDeviceGetUUID", handle))
        out["minor"] = self.maybe("nvmlDeviceGetMinorNumber", handle)
        out["name"] = _text(self.maybe("nvmlDeviceGetName", handle))
        pci = self.maybe("nvmlDeviceGetPciInfo", handle)
        out["pci"] = _text(getattr(pci, "busId", "")) if pci is not None else ""
        out["persistence"] = self._flag("nvmlDeviceGetPersistenceMode", handle)
        out["compute_mode"] = self.maybe("nvmlDeviceGetComputeMode", handle)
        out["numa_node"] = self.maybe("nvmlDeviceGetNumaNodeId", handle)
        usage = self.maybe("nvmlDeviceGetUtilizationRates", handle)
        out["utilization"] = usage.gpu if usage is not None else None
        out["recovery_action"] = self._recovery_action(handle)
        try:
            out["memory"] = self._memory(handle)
        except Failed as error:
            if error.code not in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
                out["error"] = error.data()
            out["memory"] = {"version": 0}
        try:
            out["processes"] = self._processes(handle)
        except Failed as error:
            out.setdefault("error", error.data())
            out["processes"] = []
        out["mig"] = self._mig(handle, out)
        return out

    def _flag(self, name: str, handle: t.Any) -> bool | None:
        value = self.maybe(name, handle)
        return None if value is None else bool(value)

    def _recovery_action(self, handle: t.Any) -> str:
        values = self.maybe("nvmlDeviceGetFieldValues", handle, [FIELD_RECOVERY_ACTION])
        if not values or values[0].nvmlReturn != 0:
            return ""
        number = int(values[0].value.uiVal)
        return RECOVERY_ACTIONS.get(number, "number %d" % number)

    def _memory(self, handle: t.Any) -> Data:
        """Bytes. C(used) of version 2 is total - free - reserved: what some drivers count as used includes what the
        driver keeps for itself (615 MiB on an idle H200), as all of version 1 do."""
        try:
            version = getattr(self._nvml, "nvmlMemory_v2", None)
            if version is None:
                raise Failed(FUNCTION_NOT_FOUND, "the binding has no nvmlMemory_v2")
            info = self.call("nvmlDeviceGetMemoryInfo", handle, version=version)
            total, free, reserved = int(info.total), int(info.free), int(info.reserved)
            return {"version": 2, "total": total, "reserved": reserved, "used": max(0, total - free - reserved)}
        except Failed as error:
            if error.code not in (NOT_SUPPORTED, FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH):
                raise
        info = self.call("nvmlDeviceGetMemoryInfo", handle)
        return {"version": 1, "total": int(info.total), "reserved": None, "used": int(info.used)}

    def _processes(self, handle: t.Any) -> list[Data]:
        """Every list that NVML keeps. Raises Failed where a list exists and cannot be read."""
        out: list[Data] = []
        for kind, name in _LISTS:
            try:
                found = self.call(name, handle)
            except Failed as error:
                if error.code in (NOT_SUPPORTED, FUNCTION_NOT_FOUND):
                    continue
                raise
            for process in found:
                memory = getattr(process, "usedGpuMemory", None)
                out.append(
                    {
                        "pid": int(process.pid),
                        "kind": kind,
                        "memory": None if memory is None or memory == _NOT_AVAILABLE else int(memory),
                    }
                )
        return out

    def _mig(self, handle: t.Any, out: Data) -> list[Data] | None:
        """The MIG devices of a GPU; None when MIG is off. Their processes join the GPU's own: without privilege the
        GPU's list leaves them out."""
        mode = self.maybe("nvmlDeviceGetMigMode", handle)
        if not mode or not mode[0]:
            return None
        devices: list[Data] = []
        for number in range(self.maybe("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            try:
                device = self.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, number)
            except Failed:
                continue  # this slot holds none
            instance = self.maybe("nvmlDeviceGetGpuInstanceId", device)
            devices.append({"uuid": _text(self.maybe("nvmlDeviceGetUUID", device)), "gpu_instance": instance})
            try:
                found = self._processes(device)
            except Failed as error:
                out.setdefault("error", error.data())
                continue
            known = {(process["pid"], process["kind"]) for process in out["processes"]}
            out["processes"] += [process for process in found if (process["pid"], process["kind"]) not in known]
        return devices


def _text(value: t.Any) -> str:
    if value is None:
        return ""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
