# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fixture trees of the shape of /proc and /dev, and a stand-in for the session with NVML.

Descriptors are symlinks to files of the tree; device numbers are given by C(ProcTree.stat), which the survey uses in
place of os.stat, so that no test needs the right to make device nodes.
"""

from __future__ import annotations

import os
import stat as st
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.cleanslate.inference.plugins.module_utils.common.clock import Clock
from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.nvml import (
    Fault,
    NvmlGpu,
    NvmlProcess,
    NvmlSnapshot,
    fault_of,
)
from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.survey import SurveyOptions, Surveyor
from ansible_collections.cleanslate.inference.plugins.module_utils.proc.table import ProcFS

MIB = 1024**2
TOTAL = 143771 * MIB
DEVICES = """Character devices:
  1 mem
195 nvidia
195 nvidiactl
510 nvidia-uvm
511 nvidia-caps

Block devices:
  7 loop
"""


def uuid(minor: int) -> str:
    return "GPU-fa4e0000-0000-4000-8000-%012x" % minor


class FakeClock(Clock):
    """Time that passes only when somebody waits."""

    def __init__(self) -> None:
        self.time = 100.0
        self.pauses: list[float] = []

    def now(self) -> float:
        return self.time

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.time += max(0.0, seconds)


class FakeNvml:
    """An NVML that answers what the test says. C(before) is called with the number of the question, from 1."""

    def __init__(self, gpus: Sequence[NvmlGpu] = (), fault: Fault | None = None) -> None:
        self.gpus = list(gpus)
        self.fault = fault
        self.asked = 0
        self.closed = False
        self.child_pid = 0
        self.before: Callable[[int], None] = lambda number: None

    def snapshot(self) -> NvmlSnapshot:
        self.asked += 1
        self.before(self.asked)
        if self.fault is not None:
            return NvmlSnapshot(fault=self.fault)
        return NvmlSnapshot(
            driver="580.159.04", library="13", cuda="13.0", gpus=tuple(self.gpus), binding="interpreter"
        )

    def close(self) -> None:
        self.closed = True

    def set(self, index: int, **changes: Any) -> None:
        """Change one GPU: fields of NvmlGpu; C(used) in MiB; C(processes) as (pid, MiB or None) or (pid, MiB, kind)."""
        if "used" in changes:
            changes["memory_used"] = changes.pop("used") * MIB
        if "processes" in changes:
            changes["processes"] = tuple(
                NvmlProcess(pid, kind[0] if kind else "compute", None if mib is None else mib * MIB)
                for pid, mib, *kind in changes["processes"]
            )
        if "error" in changes and isinstance(changes["error"], int):
            changes["error"] = fault_of(changes["error"], "error of the test", gpu=True)
        fields = {**self.gpus[index].__dict__, **changes}
        self.gpus[index] = NvmlGpu(**fields)


def nvml_gpus(count: int) -> list[NvmlGpu]:
    """Idle GPUs, index and minor alike."""
    return [
        NvmlGpu(
            index=number,
            uuid=uuid(number),
            pci="00000000:%02X:00.0" % (0x19 + number),
            minor=number,
            name="NVIDIA H200",
            memory_total=TOTAL,
            memory_used=0,
            memory_reserved=615 * MIB,
            utilization=0,
            persistence=True,
            compute_mode=0,
            recovery_action="none",
        )
        for number in range(count)
    ]


class ProcTree:
    """One machine: C(proc) with processes, C(dev) with nodes, and an idle NVML that knows the GPUs."""

    def __init__(self, folder: Path, gpus: int = 2, real: bool = False) -> None:
        self.folder = folder
        self.proc = folder / "proc"
        self.dev = folder / "dev"
        self.state = folder / "state"
        self.real = real
        self.owners: dict[str, int] = {}
        #: Device numbers of files of the tree, by (st_dev, st_ino).
        self.numbers: dict[tuple[int, int], int] = {}
        #: Paths that answer with EACCES.
        self.denied: set[str] = set()
        for path in (self.proc, self.dev, self.state):
            path.mkdir(parents=True)
        (self.proc / "devices").write_text(DEVICES if real else "Character devices:\n  1 mem\n", encoding="utf-8")
        for number in range(gpus):
            self.node("nvidia%d" % number, 195, number)
        self.node("nvidiactl", 195, 255)
        self.node("nvidia-uvm", 510, 0)
        self.nvml = FakeNvml(nvml_gpus(gpus))
        self.add(1, comm="systemd", argv=["/sbin/init"], ppid=0)

    def node(self, name: str, major: int = 195, minor: int = 0, device: bool | None = None) -> Path:
        """A node below dev: a character device if the tree stands for real ones, else a plain file."""
        path = self.dev / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\0" * 16)
        if self.real if device is None else device:
            status = path.stat()
            self.numbers[status.st_dev, status.st_ino] = os.makedev(major, minor)
        return path

    def gpu(self, number: int) -> Path:
        return self.dev / ("nvidia%d" % number)

    def file(self, name: str) -> Path:
        """An ordinary file of the machine."""
        path = self.folder / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return path

    def stat(self, path: str) -> os.stat_result:
        if path in self.denied:
            raise PermissionError(13, "Permission denied", path)
        status = os.stat(path)
        number = self.numbers.get((status.st_dev, status.st_ino))
        mode = st.S_IFCHR | 0o666 if number is not None else status.st_mode
        owner = self.owners.get(path, status.st_uid)
        fields = (mode, *tuple(status)[1:4], owner, *tuple(status)[5:10])
        return os.stat_result(fields, {"st_rdev": number or 0})

    def add(
        self,
        pid: int,
        comm: str = "python3",
        argv: Sequence[str] | None = None,
        ppid: int = 1,
        pgrp: int | None = None,
        session: int | None = None,
        state: str = "S",
        threads: int = 1,
        start_time: int | None = None,
        flags: int = 0,
        cgroup: str = "/user.slice/user-1000.slice/session-3.scope",
        environ: Mapping[str, str] | None = None,
        uid: int = 1000,
        opens: Iterable[Path] = (),
        maps: Iterable[Path] = (),
        tasks: Mapping[int, Iterable[Path]] | None = None,
        exe: str | None = None,
        nspid: Sequence[int] | None = None,
    ) -> Path:
        """One process. C(tasks): descriptors of threads that are not the main one's, by thread id."""
        folder = self.proc / str(pid)
        (folder / "fd").mkdir(parents=True)
        self.owners[str(folder)] = uid
        fields = [state, ppid, pgrp or pid, session or pgrp or pid, 0, -1, flags, *[0] * 10, threads, 0]
        fields += [start_time if start_time is not None else 1000 + pid, *[0] * 30]
        name = comm.encode("utf-8", "surrogateescape")[:15]
        line = b"%d (%s) %s\n" % (pid, name, " ".join(str(field) for field in fields).encode())
        (folder / "stat").write_bytes(line)
        (folder / "comm").write_bytes(name + b"\n")
        words = [] if state in "ZX" else [comm] if argv is None else argv
        (folder / "cmdline").write_bytes(b"".join(w.encode("utf-8", "surrogateescape") + b"\0" for w in words))
        (folder / "status").write_text(
            "Name:\t%s\nUid:\t%d\t%d\t%d\t%d\nNSpid:\t%s\n"
            % (comm[:15], uid, uid, uid, uid, "\t".join(str(number) for number in nspid or [pid])),
            encoding="utf-8",
            errors="surrogateescape",
        )
        (folder / "cgroup").write_text("0::%s\n" % cgroup, encoding="utf-8", errors="surrogateescape")
        env = b"".join(b"%s=%s\0" % (k.encode(), v.encode()) for k, v in (environ or {}).items())
        (folder / "environ").write_bytes(env)
        if exe is not None:
            (folder / "exe").symlink_to(exe)
        self.open(pid, opens)
        (folder / "maps").write_text("", encoding="utf-8")
        self.map(pid, maps)
        (folder / "task" / str(pid)).mkdir(parents=True)
        for tid, paths in (tasks or {}).items():
            (folder / "task" / str(tid) / "fd").mkdir(parents=True)
            (folder / "task" / str(tid) / "maps").write_text("", encoding="utf-8")
            for number, path in enumerate(paths):
                (folder / "task" / str(tid) / "fd" / str(number + 3)).symlink_to(path)
        return folder

    def open(self, pid: int, paths: Iterable[Path]) -> None:
        folder = self.proc / str(pid) / "fd"
        first = len(list(folder.iterdir())) + 3
        for number, path in enumerate(paths):
            (folder / str(first + number)).symlink_to(path)

    def map(self, pid: int, paths: Iterable[Path], deleted: bool = False) -> None:
        """Map files, shared, as C(maps) shows them; nothing is left open."""
        with open(self.proc / str(pid) / "maps", "a", encoding="utf-8") as handle:
            for number, path in enumerate(paths):
                status = path.stat()
                handle.write(
                    "%x-%x rw-s 00000000 %02x:%02x %d                          %s%s\n"
                    % (
                        0x7F0000000000 + number * 0x1000,
                        0x7F0000001000 + number * 0x1000,
                        os.major(status.st_dev),
                        os.minor(status.st_dev),
                        status.st_ino,
                        path,
                        " (deleted)" if deleted else "",
                    )
                )

    def end(self, *pids: int) -> None:
        """Processes end and are reaped."""
        for pid in pids:
            folder = self.proc / str(pid)
            for path in sorted(folder.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
            folder.rmdir()

    def options(self, **options: Any) -> SurveyOptions:
        return SurveyOptions(**{"dev_dir": str(self.dev), "state_dir": str(self.state), **options})

    def surveyor(self, **options: Any) -> Surveyor:
        """Looks at this machine; C(options) as for SurveyOptions, and C(self_pid)."""
        self_pid = options.pop("self_pid", 0)
        return Surveyor(
            self.options(**options),
            fs=ProcFS(str(self.proc)),
            nvml=self.nvml,
            self_pid=self_pid,
            stat=self.stat,
            simulated=not self.real,
        )
