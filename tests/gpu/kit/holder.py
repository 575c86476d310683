# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A program that holds a GPU, as a job does: it takes memory through libcuda.so.1 alone, no toolkit needed.

Where GPU_TEST_DEV_DIR is set it opens and maps the stand-in nodes there instead. What it does is told by the variable
GPU_TEST_HOLDER (JSON), so that its command line is the one of the job that it stands for:
  device     ordinal among the GPUs that CUDA_VISIBLE_DEVICES leaves (default 0); in simulation the minor
  mib        memory to take; 0: only initialise CUDA, as SGLang's detokenizer does
  nodes      true: have the nodes of all GPUs open, as SGLang does (it asks NVML)
  behaviour  plain | heir (forks, and the child waits for ever) | leaderless (the main thread ends, one with a CUDA
             context lives on) | stubborn (ignores TERM) | polite (ends itself at TERM)
  name       what the kernel shall call it

It prints one line of JSON when it holds.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import signal
import sys
import threading
import warnings

MIB = 1024**2
PR_SET_NAME = 15
SYS_EXIT = {"x86_64": 60, "aarch64": 93}


class Cuda:
    """One context on one GPU. Driver API: cuda.h; the primary context needs no version of it."""

    def __init__(self, device: int) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        self._ordinal = device
        self._entered = False

    def _call(self, name: str, *arguments: object) -> None:
        error = getattr(self._library, name)(*arguments)
        if error:
            sys.exit("%s fails with CUresult %d" % (name, error))

    def open_nodes(self) -> None:
        """By asking NVML, which knows nothing of CUDA_VISIBLE_DEVICES and keeps them open."""
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._nvml.nvmlInit_v2()
        count, handle = ctypes.c_uint(), ctypes.c_void_p()
        self._nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            self._nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))

    def take(self, mib: int) -> None:
        if not self._entered:
            device = ctypes.c_int()
            context = ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(device), self._ordinal)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._call("cuCtxSetCurrent", context)
            self._entered = True
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(mib * MIB))


class Nodes:
    """The stand-in: all nodes open, the own one mapped. How much memory that is worth says FAKE_GPU_MIB."""

    def __init__(self, device: int) -> None:
        folder = os.environ["GPU_TEST_DEV_DIR"]
        names = sorted(name for name in os.listdir(folder) if name.startswith("nvidia"))
        self._open = {name: os.open(os.path.join(folder, name), os.O_RDWR) for name in names}
        self._device = device
        self._maps: list[mmap.mmap] = []

    def open_nodes(self) -> None:
        """They are."""

    def take(self, mib: int) -> None:
        self._maps.append(mmap.mmap(self._open["nvidia%d" % self._device], 4096))


def hold(device: int, mib: int, nodes: bool = False) -> Cuda | Nodes:
    gpu = Nodes(device) if "GPU_TEST_DEV_DIR" in os.environ else Cuda(device)
    if nodes:
        gpu.open_nodes()
    if mib:
        gpu.take(mib)
    return gpu


def say(**facts: object) -> None:
    print(json.dumps({"pid": os.getpid(), **facts}), flush=True)


def leaderless(device: int, mib: int) -> None:
    held = threading.Event()

    def thread() -> None:
        gpu = hold(device, mib)
        held.set()
        while gpu:
            threading.Event().wait()

    threading.Thread(target=thread, daemon=True).start()
    held.wait()
    say()
    # The thread alone goes, not the process: exit(2) is not exit_group(2).
    ctypes.CDLL(None).syscall(SYS_EXIT[platform.machine()], 0)


def main() -> None:
    wanted = json.loads(os.environ.pop("GPU_TEST_HOLDER"))
    behaviour = wanted.get("behaviour", "plain")
    if wanted.get("name"):
        ctypes.CDLL(None).prctl(PR_SET_NAME, wanted["name"].encode()[:15], 0, 0, 0)
    if behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif behaviour == "polite":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    device, mib = wanted.get("device", 0), wanted["mib"]
    if behaviour == "leaderless":
        leaderless(device, mib)
    gpu = hold(device, mib, wanted.get("nodes", False))
    if behaviour == "heir":
        # With CUDA's threads beside it: that is what the job does that is tested here.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
        if child:
            say(child=child)
        while True:
            signal.pause()
    say()
    while gpu:
        signal.pause()


if __name__ == "__main__":
    main()
