# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Trees that look like /proc, real processes that end with their test, and a clock that nobody waits for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from ansible_collections.cleanslate.inference.plugins.module_utils.common.clock import Clock
from ansible_collections.cleanslate.inference.plugins.module_utils.proc.table import Process, ProcFS
from ansible_collections.cleanslate.inference.plugins.module_utils.state import files

# No deadline for one example: a busy machine is no failure. No folder of examples in the checkout.
settings.register_profile(
    "core", deadline=None, database=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("core")

BOOT = "8d1bd1f1-0000-4000-8000-000000000001"


def stat_line(pid: int, comm: bytes = b"python3", **fields: object) -> bytes:
    """The line of /proc/PID/stat, fields as proc_pid_stat(5) counts them."""
    values = {"state": "S", "ppid": 1, "pgrp": pid, "session": pid, "flags": 0x400000, "threads": 1, "start_time": 1000}
    values.update(fields)
    words = ["0"] * 50
    for name, field in (("state", 3), ("ppid", 4), ("pgrp", 5), ("session", 6), ("flags", 9)):
        words[field - 3] = str(values[name])
    words[20 - 3], words[22 - 3] = str(values["threads"]), str(values["start_time"])
    return b"%d (%s) %s\n" % (pid, comm, " ".join(words).encode())


class Tree:
    """A folder of the shape of /proc."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.fs = ProcFS(str(root))
        self.boot(BOOT)

    def boot(self, boot_id: str) -> None:
        path = self.root / "sys/kernel/random"
        path.mkdir(parents=True, exist_ok=True)
        (path / "boot_id").write_text(boot_id + "\n")
        self.fs = ProcFS(str(self.root))

    def add(
        self,
        pid: int,
        comm: bytes = b"python3",
        *,
        cmdline: bytes = b"",
        environ: bytes = b"",
        cgroup: str = "0::/\n",
        nspid: str = "",
        thread: int = 0,
        **fields: object,
    ) -> Process:
        """One process. With C(thread) its main thread is dead, and what it had is that thread's alone."""
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        if thread:
            fields = {"state": "Z", "threads": 2, **fields}
            for name in ("cmdline", "environ"):
                (folder / name).write_bytes(b"")
            (folder / "cgroup").write_text("1:name=systemd:/\n")
            (folder / "task" / str(pid)).mkdir(parents=True)
            place = folder / "task" / str(thread)
            place.mkdir()
        else:
            place = folder
        (folder / "stat").write_bytes(stat_line(pid, comm, **fields))
        (folder / "status").write_text(f"Name:\tx\nUid:\t1000\t0\t0\t0\nNSpid:\t{nspid or pid}\n")
        (place / "cmdline").write_bytes(cmdline)
        (place / "environ").write_bytes(environ)
        (place / "cgroup").write_text(cgroup)
        return self.fs.process(pid)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "proc")


class FakeClock(Clock):
    """Time that passes only in pauses; C(on_pause) is what happens meanwhile."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.pauses: list[float] = []
        self.on_pause: Callable[[], None] = lambda: None

    def now(self) -> float:
        return self.time

    def pause(self, seconds: float) -> None:
        assert seconds >= 0
        self.pauses.append(seconds)
        self.time += max(seconds, 0.001)
        self.on_pause()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


class Children:
    """Python programs in processes of their own. Each says one line once it is ready."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def start(self, code: str, *args: str, **options: object) -> subprocess.Popen[str]:
        # The folder above ansible_collections, wherever this run found the collection.
        path = str(Path(files.__file__).absolute().parents[6])
        child = subprocess.Popen(
            [sys.executable, "-S", "-c", code, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **options.pop("env", {})},
            **options,
        )
        self.started.append(child)
        return child

    def ready(self, code: str, *args: str, **options: object) -> subprocess.Popen[str]:
        child = self.start(code, *args, **options)
        line = child.stdout.readline()
        assert line, "the child ended before it was ready"
        self.said = line.strip()
        return child

    def end(self) -> None:
        for child in self.started:
            if child.poll() is None:
                child.send_signal(signal.SIGKILL)
            child.stdin.close()
            child.stdout.close()
            child.wait()


@pytest.fixture
def children() -> Iterator[Children]:
    started = Children()
    yield started
    started.end()


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Give a file to another user: truly as root, else by being another user oneself."""

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, 65534, -1, follow_symlinks=False)
        else:
            somebody = os.geteuid() + 1
            monkeypatch.setattr(os, "geteuid", lambda: somebody)

    return give
