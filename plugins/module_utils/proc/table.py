# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Processes as /proc shows them. Reads; judges nothing.

Facts used: the command name in C(stat) may hold spaces and parentheses, so fields are read after the last C(')');
a process whose main thread has exited shows state Z, an empty C(cmdline) and an empty C(fd) while its other threads
live on; kernel threads carry PF_KTHREAD in the flags field (proc_pid_stat(5), include/linux/sched.h).
"""

from __future__ import annotations

import os
import re
import typing as t

PF_KTHREAD = 0x00200000


class Vanished(Exception):
    """The process ended while it was being read. That is no error: it is gone."""


class Process:
    """One process. Numbers come from C(stat) at once; what costs more is read when first asked for, and kept.

    C(start_time) is in clock ticks since boot: with C(pid) it names a process for as long as the machine runs.
    """

    def __init__(self, fs: ProcFS, pid: int, stat: bytes) -> None:
        self._fs = fs
        self.pid = pid
        opened, closed = stat.index(b"("), stat.rindex(b")")
        self.comm = stat[opened + 1 : closed].decode("utf-8", "surrogateescape")
        fields = stat[closed + 2 :].split()
        self.state = fields[0].decode("ascii")
        self.ppid = int(fields[1])
        self.pgrp = int(fields[2])
        self.session = int(fields[3])
        self.kernel_thread = bool(int(fields[6]) & PF_KTHREAD)
        self.threads = int(fields[17])
        self.start_time = int(fields[19])
        self._kept: dict[str, t.Any] = {}

    def __repr__(self) -> str:
        return "Process(pid=%d, start_time=%d, comm=%r)" % (self.pid, self.start_time, self.comm)

    def _once(self, what: str, read: t.Callable[[], t.Any]) -> t.Any:
        if what not in self._kept:
            self._kept[what] = read()
        return self._kept[what]

    @property
    def zombie(self) -> bool:
        """Dead as a whole: a zombie leader with live threads is not one."""
        return self.state in ("Z", "X") and self.threads <= 1

    @property
    def argv(self) -> list[str]:
        """The command line; empty for kernel threads, zombies and processes that have vanished or hide it.

        setproctitle writes the title over it: one word, perhaps padded (empty words are dropped at the end).
        """

        def read() -> list[str]:
            raw = self._fs.read(self.pid, "cmdline") or b""
            words = raw.rstrip(b"\0").split(b"\0") if raw.strip(b"\0") else []
            return [word.decode("utf-8", "surrogateescape") for word in words]

        return self._once("argv", read)

    @property
    def title(self) -> str:
        """What the process calls itself: the first word, which setproctitle replaces by a title; else the name."""
        return self.argv[0].strip() if self.argv else self.comm

    @property
    def exe(self) -> str | None:
        """Path of the program, None when it cannot be read."""
        return self._once("exe", lambda: self._fs.link(self.pid, "exe"))

    @property
    def status(self) -> dict[str, str]:
        def read() -> dict[str, str]:
            raw = (self._fs.read(self.pid, "status") or b"").decode("utf-8", "surrogateescape")
            return {key: value.strip() for key, sep, value in (line.partition(":") for line in raw.split("\n")) if sep}

        return self._once("status", read)

    @property
    def uid(self) -> int | None:
        """The real user id, None when it cannot be read."""
        words = self.status.get("Uid", "").split()
        return int(words[0]) if words else None

    @property
    def nspid(self) -> list[int]:
        """The pid in each PID namespace from the reader's own down to the process's: the last is the guest's."""
        return [int(word) for word in self.status.get("NSpid", "").split()] or [self.pid]

    @property
    def cgroup_text(self) -> bytes:
        """C(/proc/P/cgroup) as it is: the paths of all hierarchies."""
        return self._once("cgroup_text", lambda: self._fs.read(self.pid, "cgroup") or b"")

    @property
    def cgroup(self) -> str:
        """Its cgroup path: of the unified hierarchy, or of systemd's own on a v1 machine; empty when unknown."""

        def read() -> str:
            raw = self.cgroup_text.decode("utf-8", "surrogateescape")
            named = ""
            for line in raw.split("\n"):
                hierarchy, _sep, rest = line.partition(":")
                controllers, _sep, path = rest.partition(":")
                if hierarchy == "0" and not controllers and path not in ("", "/"):
                    return path
                if controllers == "name=systemd" or (hierarchy == "0" and not named):
                    named = path
            return named

        return self._once("cgroup", read)

    @property
    def environ(self) -> dict[str, str] | None:
        """The environment that C(/proc) shows, None when it may not be read.

        A worker titled by setproctitle without C(SPT_NOENV=1) has destroyed most of its own (measured: 18 of 43 left).
        """

        def read() -> dict[str, str] | None:
            raw = self._fs.read(self.pid, "environ")
            if raw is None:
                return None
            out: dict[str, str] = {}
            for word in raw.split(b"\0"):
                name, sep, value = word.decode("utf-8", "surrogateescape").partition("=")
                if sep and name:
                    out[name] = value
            return out

        return self._once("environ", read)

    @property
    def pid_namespace(self) -> str | None:
        return self._once("pidns", lambda: self._fs.link(self.pid, "ns/pid"))


class ProcFS:
    """A mounted procfs (or a fixture tree of the same shape)."""

    def __init__(self, root: str = "/proc") -> None:
        self.root = root

    def path(self, pid: int, *names: str) -> str:
        return os.path.join(self.root, str(pid), *names)

    def read(self, pid: int, name: str) -> bytes | None:
        """The bytes of one file; None when the process is gone or the file may not be read."""
        try:
            with open(self.path(pid, name), "rb") as handle:
                return handle.read()
        except OSError:
            return None

    def link(self, pid: int, name: str) -> str | None:
        try:
            return os.readlink(self.path(pid, name))
        except OSError:
            return None

    def pids(self) -> list[int]:
        return sorted(int(name) for name in os.listdir(self.root) if name.isdigit())

    def tasks(self, pid: int) -> list[int]:
        """The thread ids of a process; none when it is gone."""
        try:
            return sorted(int(name) for name in os.listdir(self.path(pid, "task")) if name.isdigit())
        except OSError:
            return []

    def process(self, pid: int) -> Process:
        """Read one process. Raises Vanished when there is none of this pid."""
        raw = self.read(pid, "stat")
        if not raw:
            raise Vanished(pid)
        try:
            return Process(self, pid, raw)
        except (ValueError, IndexError):
            raise Vanished(pid) from None

    def processes(self) -> dict[int, Process]:
        """All processes by pid."""
        out: dict[int, Process] = {}
        for pid in self.pids():
            try:
                out[pid] = self.process(pid)
            except Vanished:
                continue
        return out

    def boot_id(self) -> str:
        """Changes with each boot of the kernel (a container shows its host's)."""
        try:
            with open(os.path.join(self.root, "sys/kernel/random/boot_id"), encoding="ascii") as handle:
                return handle.read().strip()
        except OSError:
            return ""


def ancestors(table: t.Mapping[int, Process], pid: int) -> list[int]:
    """The pids above C(pid), nearest first."""
    out: list[int] = []
    while pid in table and table[pid].ppid > 0 and table[pid].ppid not in out:
        pid = table[pid].ppid
        out.append(pid)
    return out


def descendants(table: t.Mapping[int, Process], roots: t.Iterable[int]) -> set[int]:
    """The pids below any of C(roots), without the roots themselves."""
    children: dict[int, list[int]] = {}
    for process in table.values():
        children.setdefault(process.ppid, []).append(process.pid)
    roots = set(roots)
    out: set[int] = set()
    todo = list(roots)
    while todo:
        for child in children.get(todo.pop(), ()):
            if child not in out:
                out.add(child)
                todo.append(child)
    return out - roots


def unescape_mount(text: str) -> str:
    """Undo the octal escapes that C(maps) and C(mountinfo) write for space, tab, newline and backslash."""
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), text)
