# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""NVML behind a deadline: all calls happen in a child process that can be given up.

Facts used: the driver can hang in an uninterruptible sleep (gpud#117), so nothing here waits for the child without
limit, not even for its end; whoever initialises NVML holds device nodes itself, so C(child_pid) is left out of scans;
a library that crashes takes only the child with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import select
import signal
import sys
import typing as t

from ..common.clock import Clock
from ..common.text import show
from .nvml_queries import Failed, Queries

#: Name of the child in process lists, and its mark for other instances of this collection on the same machine.
CHILD_NAME = "cleanslate-nvml"
BINDING = "nvidia-ml-py"


@dataclasses.dataclass(frozen=True)
class Fault:
    """Why something could not be asked: a reason code, a sentence, and what to do."""

    reason: str
    message: str
    advice: str
    #: nvmlReturn_t, 0 when NVML was not even reached.
    code: int = 0


@dataclasses.dataclass(frozen=True)
class NvmlProcess:
    """An entry of NVML's lists. Its pid is evidence, never a target: it may be dead, or of another PID namespace."""

    pid: int
    #: C(compute), C(graphics) or C(mps).
    kind: str = "compute"
    #: Bytes, None when NVML does not say.
    memory: int | None = None


@dataclasses.dataclass(frozen=True)
class NvmlGpu:
    index: int
    uuid: str = ""
    pci: str = ""
    minor: int | None = None
    name: str = ""
    #: Bytes; None when it cannot be measured. C(memory_used) is without what the driver keeps for itself, unless
    #: C(memory_version) is 1.
    memory_total: int | None = None
    memory_used: int | None = None
    memory_reserved: int | None = None
    memory_version: int = 2
    processes: tuple[NvmlProcess, ...] = ()
    utilization: int | None = None
    persistence: bool | None = None
    compute_mode: int | None = None
    #: MIG devices as C({uuid, gpu_instance}); None when MIG is off.
    mig: tuple[t.Mapping[str, t.Any], ...] | None = None
    #: NUMA node of its memory where that is the system's memory too (GH200, GB200); None on others.
    numa_node: int | None = None
    #: What the driver asks for, C(none) or empty when nothing.
    recovery_action: str = ""
    error: Fault | None = None


@dataclasses.dataclass(frozen=True)
class NvmlSnapshot:
    fault: Fault | None = None
    driver: str = ""
    library: str = ""
    cuda: str = ""
    gpus: tuple[NvmlGpu, ...] = ()
    #: Where the binding was found: C(interpreter), C(pynvml_path) or empty.
    binding: str = ""

    @property
    def ok(self) -> bool:
        return self.fault is None

    @property
    def reason(self) -> str:
        return self.fault.reason if self.fault else ""

    @property
    def message(self) -> str:
        return self.fault.message if self.fault else ""

    @property
    def advice(self) -> str:
        return self.fault.advice if self.fault else ""


# nvml.h: nvmlReturn_t -> reason, what it means, what to do.
_FAULTS: dict[int, tuple[str, str, str]] = {
    4: ("nvml_unavailable", "this user may not ask the driver", "Run the play with become: true."),
    9: (
        "nvml_unavailable",
        "the NVIDIA kernel driver is not loaded",
        "Load it (modprobe nvidia) and look at dmesg; in a container, load it on the host.",
    ),
    10: ("nvml_timeout", "the driver did not answer NVML in time", "Look at dmesg for Xid messages."),
    12: (
        "nvml_unavailable",
        "libnvidia-ml.so.1 is not there",
        "Install the driver's user space; in a container, pass the host's library in or install the same version.",
    ),
    15: (
        "gpu_lost",
        "the GPU has fallen off the bus (Xid 79 in dmesg)",
        "Reset it or reboot the node; if it comes again, look at its seat and power.",
    ),
    16: (
        "reset_required",
        "the GPU must be reset",
        "End everything that holds it, then nvidia-smi --gpu-reset, or reboot.",
    ),
    17: (
        "nvml_unavailable",
        "the operating system blocks access to the GPU",
        "Allow its device numbers in the container's cgroup (lxc.cgroup2.devices.allow); after a systemctl "
        "daemon-reload on the host, restart the container.",
    ),
    18: (
        "version_mismatch",
        "libnvidia-ml and the loaded kernel module are of different versions",
        "Reboot, or reload the module, after a driver update; in a container, install the host's driver version "
        "(/proc/driver/nvidia/version).",
    ),
    27: ("nvml_unavailable", "the GPU is not ready", "Look at nvidia-smi conf-compute and at dmesg."),
    28: ("gpu_lost", "the GPU is not there any more", "Look at dmesg, reboot the node."),
    999: (
        "nvml_unavailable",
        "the driver fails for a reason that it does not know",
        "Look at dmesg. A container may have lost its devices by a systemctl daemon-reload on the host: restart it.",
    ),
}


def fault_of(code: int, text: str, gpu: bool = False) -> Fault:
    """The fault behind one nvmlReturn_t."""
    reason, meaning, advice = _FAULTS.get(code, ("nvml_unavailable", "NVML fails", "Look at dmesg and nvidia-smi."))
    if gpu and code in (9, 12):
        meaning = "NVML lost the driver"
    return Fault(reason, "%s (NVML error %d: %s)" % (meaning, code, show(text)), advice, code)


def timeout_fault(seconds: float) -> Fault:
    return Fault(
        "nvml_timeout",
        "the driver did not answer NVML within %g s" % round(seconds, 1),
        "It may hang: look at dmesg for Xid messages and at processes in state D. Longer: nvml_timeout.",
    )


def missing_fault(path: str) -> Fault:
    return Fault(
        "binding_missing",
        "the Python of this node has no pynvml (package %s)" % BINDING,
        "Run role gpu_node, which puts it to %s, or install %s." % (path, BINDING),
    )


def snapshot_of(data: t.Mapping[str, t.Any]) -> NvmlSnapshot:
    """The snapshot in the child's answer."""
    return NvmlSnapshot(
        driver=data["driver"],
        library=data["library"],
        cuda=data["cuda"],
        binding=data.get("binding", ""),
        gpus=tuple(_gpu_of(gpu) for gpu in data["gpus"]),
    )


def _gpu_of(data: t.Mapping[str, t.Any]) -> NvmlGpu:
    error = data.get("error")
    memory = data.get("memory") or {"version": 0}
    measured = memory["version"] > 0 and memory["total"] > 0
    return NvmlGpu(
        index=data["index"],
        uuid=data.get("uuid", ""),
        pci=data.get("pci", ""),
        minor=data.get("minor"),
        name=data.get("name", ""),
        memory_total=memory["total"] if measured else None,
        memory_used=memory["used"] if measured else None,
        memory_reserved=memory["reserved"] if measured else None,
        memory_version=memory["version"],
        processes=tuple(NvmlProcess(**process) for process in data.get("processes", ())),
        utilization=data.get("utilization"),
        persistence=data.get("persistence"),
        compute_mode=data.get("compute_mode"),
        mig=None if data.get("mig") is None else tuple(data["mig"]),
        numa_node=data.get("numa_node"),
        recovery_action=data.get("recovery_action", ""),
        error=fault_of(error["code"], error["text"], gpu=True) if error else None,
    )


class NvmlSource(t.Protocol):
    """What a survey needs of NVML; the session below, or a stand-in in tests."""

    @property
    def child_pid(self) -> int: ...

    def snapshot(self) -> NvmlSnapshot: ...

    def close(self) -> None: ...


class NvmlSession:
    """NVML, initialised once and asked as often as needed. C(timeout) seconds for each answer, the first included."""

    def __init__(self, pynvml_path: str, timeout: float, clock: Clock | None = None) -> None:
        self._path = pynvml_path
        self._timeout = timeout
        self._clock = clock or Clock()
        self._pid = 0
        self._pidfd = -1
        self._to = self._from = -1
        self._fault: Fault | None = None

    @property
    def child_pid(self) -> int:
        """Pid of the child while it lives, else 0."""
        return self._pid

    def __enter__(self) -> NvmlSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def snapshot(self) -> NvmlSnapshot:
        """Ask everything now. Never raises and never hangs: what goes wrong is the snapshot's fault.

        After a timeout or a crash the session stays failed.
        """
        if self._fault is not None:
            return NvmlSnapshot(fault=self._fault)
        if not self._pid:
            self._start()
        answer = self._ask()
        if isinstance(answer, Fault):
            self._fault = answer
            self.close()
            return NvmlSnapshot(fault=answer)
        if "missing" in answer:
            return NvmlSnapshot(fault=missing_fault(self._path))
        if "failed" in answer:
            failed = answer["failed"]
            return NvmlSnapshot(fault=fault_of(failed["code"], failed["text"]), binding=answer.get("binding", ""))
        return snapshot_of(answer)

    def _start(self) -> None:
        ask, self._to = os.pipe()
        self._from, answer = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _child(ask, answer, parent, self._path)
        os.close(ask)
        os.close(answer)
        self._pid = pid
        self._pidfd = os.pidfd_open(pid)

    def _ask(self) -> dict[str, t.Any] | Fault:
        started = self._clock.now()
        crashed = Fault("nvml_unavailable", "NVML's library crashed or broke off", "Look at dmesg and nvidia-smi.")
        try:
            os.write(self._to, b"?")
        except BrokenPipeError:
            return crashed
        received = b""
        poller = select.poll()
        poller.register(self._from, select.POLLIN)
        while not received.endswith(b"\n"):
            left = self._timeout - (self._clock.now() - started)
            if left <= 0 or not poller.poll(left * 1000):
                return timeout_fault(self._timeout)
            chunk = os.read(self._from, 1 << 16)
            if not chunk:
                return crashed
            received += chunk
        return json.loads(received.decode("utf-8"))

    def close(self) -> None:
        """End the child. Waits for its end for a second at most: in the driver it may be deaf even to KILL."""
        if not self._pid:
            return
        os.close(self._to)
        os.close(self._from)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        poller.poll(1000)
        os.close(self._pidfd)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, os.WNOHANG)
        self._pid = 0


def _child(ask: int, answer: int, parent: int, path: str) -> t.NoReturn:
    """The child: never returns, never touches the parent's files, dies with its parent."""
    code = 1
    try:
        # An open stdout would keep the connection to the control node open for as long as the driver hangs.
        null = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(null, fd)
        for fd in [int(name) for name in os.listdir("/proc/self/fd")]:
            if fd > 2 and fd not in (ask, answer):
                with contextlib.suppress(OSError):  # the listing's own is closed already
                    os.close(fd)
        libc = ctypes.CDLL(None)
        libc.prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG
        libc.prctl(15, CHILD_NAME.encode("ascii"), 0, 0, 0)  # PR_SET_NAME
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        if os.getppid() == parent:
            _serve(ask, answer, path)
        code = 0
    finally:
        os._exit(code)


def load_binding(path: str) -> tuple[t.Any, str]:
    """nvidia-ml-py and where it came from: C(interpreter) or C(pynvml_path). Raises ImportError."""
    try:
        import pynvml

        source = "interpreter"
    except ImportError:
        sys.path.append(path)
        try:
            import pynvml

            source = "pynvml_path"
        finally:
            sys.path.remove(path)
    return pynvml, source


def _serve(ask: int, answer: int, path: str) -> None:
    queries: Queries | None = None
    source = ""
    while os.read(ask, 1):
        try:
            if queries is None:
                binding, source = load_binding(path)
                fresh = Queries(binding)
                fresh.start()
                queries = fresh
            data = queries.everything()
        except ImportError:
            data = {"missing": True}
        except Failed as error:
            data = {"failed": error.data()}
        data["binding"] = source
        line = json.dumps(data).encode("utf-8") + b"\n"
        while line:
            line = line[os.write(answer, line) :]
