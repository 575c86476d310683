# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""An observer of its own, outside of the trials: what each GPU's memory is, all the time.

It asks NVML directly, and nothing else of this collection: it must not share the modules' errors.
"""

from __future__ import annotations

import bisect
import threading
import time
from typing import Any

MIB = 1024**2
#: An idle GPU shows less (bytes): 2-3 MiB are normal for a while.
IDLE = 128 * MIB


class Meter:
    def __init__(self, pynvml: Any, interval: float) -> None:
        self._nvml = pynvml
        pynvml.nvmlInit()
        self.count = pynvml.nvmlDeviceGetCount()
        self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(self.count)]
        self._interval = interval
        #: Monotonic times before each question, and the answers in bytes.
        self.times: list[float] = []
        self.used: list[tuple[int, ...]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def memory(self) -> tuple[int, ...]:
        """Bytes in use on each GPU, without what the driver keeps for itself."""
        out = []
        for handle in self._handles:
            info = self._nvml.nvmlDeviceGetMemoryInfo(handle, version=self._nvml.nvmlMemory_v2)
            out.append(max(0, int(info.total) - int(info.free) - int(info.reserved)))
        return tuple(out)

    def processes(self) -> list[tuple[int, int]]:
        """GPU and pid of whatever NVML lists."""
        return [
            (index, int(process.pid))
            for index, handle in enumerate(self._handles)
            for ask in (
                self._nvml.nvmlDeviceGetComputeRunningProcesses,
                self._nvml.nvmlDeviceGetGraphicsRunningProcesses,
            )
            for process in ask(handle)
        ]

    def machine(self) -> dict[str, Any]:
        def text(value: Any) -> str:
            return value.decode() if isinstance(value, bytes) else str(value)

        return {
            "driver": text(self._nvml.nvmlSystemGetDriverVersion()),
            "gpus": [text(self._nvml.nvmlDeviceGetName(handle)) for handle in self._handles],
            "memory_mib": [
                int(self._nvml.nvmlDeviceGetMemoryInfo(handle, version=self._nvml.nvmlMemory_v2).total) // MIB
                for handle in self._handles
            ],
        }

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self.times.append(time.monotonic())
            self.used.append(self.memory())

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def at(self, moment: float) -> tuple[int, ...]:
        """The first answer to a question asked at C(moment) or later; the last one if there is none yet."""
        number = bisect.bisect_left(self.times, moment)
        return self.used[min(number, len(self.used) - 1)]

    def back(self, gpu: int, after: float) -> float | None:
        """When the memory of a GPU was first seen to be back. The question's own time counts, so this is never too
        late by more than one interval."""
        for number in range(bisect.bisect_left(self.times, after), len(self.used)):
            if self.used[number][gpu] <= IDLE:
                return self.times[number]
        return None

    def wait_idle(self, seconds: float) -> bool:
        """Wait until every GPU is idle and NVML lists nobody."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if all(used <= IDLE for used in self.memory()) and not self.processes():
                return True
            time.sleep(0.02)
        return False
