# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Stand-in GPUs in a test's own folder, processes that hold them, and what nvidia-ml-py makes of it.

The stand-in NVML matches nodes by inode, so that it never counts a process that the test did not start.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

LAB = Path(__file__).resolve().parents[2] / "lab"

HOLDER = """
import json, mmap, os, signal, sys
wish = json.loads(sys.argv[1])
kept = []
for node in wish["opens"]:
    kept.append(os.open(os.path.join(wish["dev"], node), os.O_RDWR | os.O_NOCTTY))
for node in wish["maps"]:
    descriptor = os.open(os.path.join(wish["dev"], node), os.O_RDWR)
    kept.append(mmap.mmap(descriptor, 4096))
    os.close(descriptor)
print("ready", flush=True)
if wish["thread"]:
    import ctypes, threading
    threading.Thread(target=threading.Event().wait).start()
    ctypes.CDLL(None).pthread_exit(None)
signal.pause()
"""

QUERY = """
import json, sys, time
import pynvml as nvml

def plain(process):
    return {"pid": process.pid, "mib": None if process.usedGpuMemory is None else process.usedGpuMemory >> 20}

def ask(call, *arguments, **more):
    try:
        return call(*arguments, **more)
    except nvml.NVMLError as error:
        return {"error": error.value, "text": str(error)}

def memory(handle):
    v2 = ask(nvml.nvmlDeviceGetMemoryInfo, handle, version=nvml.nvmlMemory_v2)
    v1 = ask(nvml.nvmlDeviceGetMemoryInfo, handle)
    row = {"v2": v2, "v1": v1}
    if not isinstance(v2, dict):
        row.update(v2=(v2.total - v2.free - v2.reserved) >> 20, v2_used=v2.used >> 20, total=v2.total >> 20)
    if not isinstance(v1, dict):
        row.update(v1=v1.used >> 20, total=v1.total >> 20)
    return row

def card(handle):
    rows = ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    row = memory(handle)
    row["uuid"] = nvml.nvmlDeviceGetUUID(handle)
    row["processes"] = rows if isinstance(rows, dict) else [plain(process) for process in rows]
    return row

def survey():
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = ask(nvml.nvmlDeviceGetHandleByIndex, index)
        if isinstance(handle, dict):
            found.append(handle)
            continue
        row = card(handle)
        row["minor"] = nvml.nvmlDeviceGetMinorNumber(handle)
        row["pci"] = nvml.nvmlDeviceGetPciInfo(handle).busId
        field = nvml.nvmlDeviceGetFieldValues(handle, [230])[0]
        row["recovery"] = field.value.uiVal
        row["utilization"] = ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        if not isinstance(row["utilization"], dict):
            row["utilization"] = row["utilization"].gpu
        row["mig"] = []
        if nvml.nvmlDeviceGetMigMode(handle)[0]:
            for i in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
                mig = ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, i)
                if not isinstance(mig, dict):
                    row["mig"].append({**card(mig), "instance": nvml.nvmlDeviceGetGpuInstanceId(mig)})
        found.append(row)
    return found

started = ask(nvml.nvmlInit)
if started is not None:
    print(json.dumps(started))
    sys.exit()
print(json.dumps(survey()), flush=True)
for line in sys.stdin:
    print(json.dumps(survey()), flush=True)
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the stand-in libnvidia-ml.so.1, built without a warning."""
    folder = tmp_path_factory.mktemp("nvml")
    done = subprocess.run(
        ["make", "-s", "-C", str(LAB / "nvml"), f"OUT={folder}", "CFLAGS=-O1 -Werror"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    """A device folder with four GPUs as plain files."""
    folder = tmp_path / "dev"
    folder.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (folder / name).write_bytes(bytes(4096))
    return folder


class Started:
    """Processes that a test started, each ended by its own handle."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(words, text=True, stdout=subprocess.PIPE, **options)
        self.processes.append(process)
        return process

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


@pytest.fixture
def started() -> Iterator[Started]:
    processes = Started()
    yield processes
    processes.end()


@pytest.fixture
def hold(dev: Path, started: Started) -> Callable[..., subprocess.Popen[str]]:
    """Start a process that has nodes open or mapped: hold(maps=[0], opens=[1, 2], CUDA_VISIBLE_DEVICES="0")."""

    def start(
        maps: tuple[int, ...] = (), opens: tuple[int | str, ...] = (), thread: bool = False, **environment: str
    ) -> subprocess.Popen[str]:
        nodes = [f"nvidia{node}" if isinstance(node, int) else node for node in opens]
        wish = {"dev": str(dev), "maps": [f"nvidia{node}" for node in maps], "opens": nodes, "thread": thread}
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("CUDA_", "FAKE_"))}
        process = started.start(sys.executable, "-S", "-c", HOLDER, json.dumps(wish), env={**clean, **environment})
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    return start


class Nvml:
    """nvidia-ml-py in a process of its own, over the stand-in library."""

    def __init__(self, library: Path, dev: Path, started: Started) -> None:
        self.started = started
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith(("CUDA_", "FAKE_"))}
        self.environment.update(LD_LIBRARY_PATH=str(library), FAKE_NVML_DEV_DIR=str(dev))

    def session(self, wrapper: tuple[str, ...] = (), **settings: object) -> Callable[[], Any]:
        """A process that stays: each call is one more survey."""
        environment = {**self.environment, **{f"FAKE_NVML_{key}": str(value) for key, value in settings.items()}}
        process = self.started.start(
            *wrapper, sys.executable, "-c", QUERY, env=environment, stdin=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.process = process
        first = True

        def ask(timeout: float = 20) -> Any:
            nonlocal first
            assert process.stdin is not None and process.stdout is not None
            if not first:
                process.stdin.write("\n")
                process.stdin.flush()
            first = False
            if not select.select([process.stdout], [], [], timeout)[0]:
                raise TimeoutError
            line = process.stdout.readline()
            try:
                return json.loads(line)
            except ValueError:
                raise AssertionError(line + process.stdout.read()) from None

        return ask

    def __call__(self, wrapper: tuple[str, ...] = (), **settings: object) -> Any:
        """One survey."""
        ask = self.session(wrapper, **settings)
        answer = ask()
        self.process.kill()
        self.process.wait()
        return answer


@pytest.fixture
def nvml(library: Path, dev: Path, started: Started) -> Nvml:
    return Nvml(library, dev, started)
