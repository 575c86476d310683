# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Processes as /proc shows them. Reads; judges nothing.

Facts used: the command name in C(stat) may hold spaces and parentheses, so fields are read after the last C(')');
a process whose main thread has exited shows state Z, an empty C(cmdline) and an empty C(fd) while its other threads
live on, so what is missing is read from one of those; kernel threads carry PF_KTHREAD in the flags field
(proc_pid_stat(5), include/linux/sched.h).
"""

from __future__ import annotations

import errno
import os
import re
import typing as t

from ..common.errors import CleanslateError

PF_EXITING = 0x00000004
PF_KTHREAD = 0x00200000


class Vanished(Exception):
    """The process ended while it was being read. That is no error: it is gone."""


class Hidden(Vanished):
    """There is a process of this pid, and this user may know nothing of it (C(hidepid=1)). Who must not be blind
    catches this before Vanished."""


# What the kernel answers when a process ends while one of its files is opened or read.
_GONE = (errno.ENOENT, errno.ESRCH, errno.ENOTDIR)
_DENIED = (errno.EACCES, errno.EPERM)


_CHUNK = 1 << 16


class Process:
    """One process. Numbers come from C(stat) at once; what costs more is read when first asked for, and kept.

    C(start_time) is in clock ticks since boot: with C(pid) it names a process for as long as the machine runs.
    """

    def __init__(self, fs: ProcFS, pid: int, stat: bytes) -> None:
        self._fs = fs
        self.pid = pid
        #: The line that this was read from.
        self.raw = stat
        opened, closed = stat.index(b"("), stat.rindex(b")")
        self.comm = stat[opened + 1 : closed].decode("utf-8", "surrogateescape")
        fields = stat[closed + 2 :].split()
        self.state = fields[0].decode("ascii")
        self.ppid = int(fields[1])
        self.pgrp = int(fields[2])
        self.session = int(fields[3])
        flags = int(fields[6])
        self.kernel_thread = bool(flags & PF_KTHREAD)
        #: It is on its way out and may have let go of its files already; the driver may need it a while longer.
        self.exiting = bool(flags & PF_EXITING)
        self.threads = int(fields[17])
        self.start_time = int(fields[19])
        self._kept: dict[str, t.Any] = {}

    def __repr__(self) -> str:
        return "Process(pid=%d, start_time=%d, comm=%r)" % (self.pid, self.start_time, self.comm)

    def _live(self, read: t.Callable[[int, str], t.Any], name: str) -> t.Any:
        """Read one entry: of a process whose main thread is dead from a thread that lives, because the kernel has
        taken memory, files and (version 1) cgroups from the main thread."""
        if self.state in "ZX" and self.threads > 1:
            for thread in self._fs.tasks(self.pid):
                if thread != self.pid:
                    found = read(self.pid, "task/%d/%s" % (thread, name))
                    if found:
                        return found
        return read(self.pid, name)

    def _once(self, what: str, read: t.Callable[[], t.Any]) -> t.Any:
        if what not in self._kept:
            self._kept[what] = read()
        return self._kept[what]

    def keep(self) -> None:
        """Read now who it is (program, command line, environment, cgroup, user): it may end before anybody asks."""
        for name in ("exe", "argv", "environ", "cgroup_text", "status"):
            getattr(self, name)

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
            raw = self._live(self._fs.read, "cmdline") or b""
            words = raw.rstrip(b"\0").split(b"\0") if raw.strip(b"\0") else []
            return [word.decode("utf-8", "surrogateescape") for word in words]

        return self._once("argv", read)

    @property
    def title(self) -> str:
        """What the process calls itself: the first word, which setproctitle replaces by a title; else the name."""
        return (self.argv[0].strip() if self.argv else "") or self.comm

    @property
    def exe(self) -> str | None:
        """Path of the program, None when it cannot be read.

        The kernel appends C( (deleted)) once the file was replaced, as each upgrade does: it is still that program.
        """

        def read() -> str | None:
            path = self._live(self._fs.link, "exe")
            return path[: -len(" (deleted)")] if path and path.endswith(" (deleted)") else path

        return self._once("exe", read)

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
        return self._once("cgroup_text", lambda: self._live(self._fs.read, "cgroup") or b"")

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
            raw = self._live(self._fs.read, "environ")
            if raw is None:
                return None
            out: dict[str, str] = {}
            for word in raw.split(b"\0"):
                name, sep, value = word.decode("utf-8", "surrogateescape").partition("=")
                if sep and name:
                    out.setdefault(name, value)  # getenv(3) finds the first
            return out

        return self._once("environ", read)

    @property
    def pid_namespace(self) -> str | None:
        return self._once("pidns", lambda: self._live(self._fs.link, "ns/pid"))

    def group_leader(self) -> Process | None:
        """The process that leads this one's group: looked up now, so that it need be in no table. None when it is
        gone. Raises Hidden when there is one of which this user may know nothing."""
        return self._fs.find(self.pgrp)

    def namespace_started(self) -> int:
        """When this PID namespace began, as C(start_time) counts: 0 where that is unknown."""
        return self._fs.namespace_started()

    def boot_id(self) -> str:
        return self._fs.boot_id()


class ProcFS:
    """A mounted procfs (or a fixture tree of the same shape)."""

    def __init__(self, root: str = "/proc") -> None:
        self.root = root
        self._namespace_started: int | None = None
        self._boot_id: str | None = None

    def path(self, pid: int, *names: str) -> str:
        return "/".join((self.root, str(pid), *names))

    def read(self, pid: int, name: str) -> bytes | None:
        """The bytes of one file; None when the process is gone or the file may not be read.

        Raises CleanslateError when this process itself is in need (no descriptors, no memory): that says nothing
        about the one that it looks at.
        """
        try:
            return self._read(self.path(pid, name))
        except OSError:
            return None

    def _read(self, path: str, line: bool = False) -> bytes:
        try:
            # Plain calls: a scan of thousands of processes notices the buffered reader's own.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                chunks = [os.read(fd, _CHUNK)]
                while chunks[-1] and not line:
                    chunks.append(os.read(fd, _CHUNK))
                return b"".join(chunks)
            finally:
                os.close(fd)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise CleanslateError("%s cannot be read: %s." % (path, os.strerror(error.errno))) from None
            raise

    def link(self, pid: int, name: str) -> str | None:
        try:
            return os.readlink(self.path(pid, name))
        except OSError:
            return None

    def pids(self) -> list[int]:
        try:
            return self._numbers(self.root)
        except OSError as error:
            raise CleanslateError("%s cannot be read: %s." % (self.root, os.strerror(error.errno or 0))) from None

    def tasks(self, pid: int) -> list[int]:
        """The thread ids of a process; none when it is gone."""
        try:
            return self._numbers(self.path(pid, "task"))
        except OSError:
            return []

    @staticmethod
    def _numbers(folder: str) -> list[int]:
        return sorted(int(name) for name in os.listdir(folder) if name.isascii() and name.isdigit())

    def process(self, pid: int) -> Process:
        """Read one process. Raises Vanished when there is none of this pid, Hidden when it may not be looked at."""
        try:
            return Process(self, pid, self._read(self.path(pid, "stat"), line=True))
        except OSError as error:
            if error.errno in _DENIED:
                raise Hidden(pid) from None
            if error.errno in _GONE:
                raise Vanished(pid) from None
            why = os.strerror(error.errno or 0)
            raise CleanslateError("%s cannot be read: %s." % (self.path(pid, "stat"), why)) from None
        except (ValueError, IndexError):
            # The kernel writes this line whole or not at all.
            raise Vanished(pid) from None

    def find(self, pid: int) -> Process | None:
        """One living process, None when there is none of this pid. Raises Hidden when it may not be looked at, also
        where C(hidepid=2) denies that it exists."""
        try:
            process = self.process(pid)
            return None if process.zombie else process
        except Hidden:
            raise
        except Vanished:
            pass
        if self.root == "/proc" and pid > 0:
            try:
                os.kill(pid, 0)  # no signal at all, but the kernel's word on whether there is such a process
            except PermissionError:
                raise Hidden(pid) from None
            except OSError:
                return None
        return None

    def namespace_started(self) -> int:
        """Start time of the first process: of the machine, or of a container, which may start anew in the same boot
        and then counts its pids from 1 again. 0 when it is unknown."""
        if self._namespace_started is None:
            try:
                self._namespace_started = self.process(1).start_time
            except Vanished:
                self._namespace_started = 0
        return self._namespace_started

    def processes(self) -> dict[int, Process]:
        """All processes by pid, without those that are hidden from this user."""
        out: dict[int, Process] = {}
        for pid in self.pids():
            try:
                out[pid] = self.process(pid)
            except Vanished:
                continue
        return out

    def pid_max(self) -> int:
        """The highest pid that a process here can have (4194304 where the kernel does not say)."""
        try:
            with open(os.path.join(self.root, "sys/kernel/pid_max"), encoding="ascii") as handle:
                return int(handle.read())
        except (OSError, ValueError):
            return 4194304

    def boot_id(self) -> str:
        """Changes with each boot of the kernel (a container shows its host's). Empty when it is unknown."""
        if self._boot_id is None:
            try:
                with open(os.path.join(self.root, "sys/kernel/random/boot_id"), encoding="ascii") as handle:
                    self._boot_id = handle.read().strip()
            except (OSError, ValueError):
                self._boot_id = ""
        return self._boot_id


def ancestors(table: t.Mapping[int, Process], pid: int) -> list[int]:
    """The pids above C(pid), nearest first."""
    out: list[int] = []
    while pid in table and table[pid].ppid > 0 and table[pid].ppid not in out:
        pid = table[pid].ppid
        out.append(pid)
    return out


def descendants(table: t.Mapping[int, Process], roots: t.Iterable[int]) -> set[int]:
    """The pids below any of C(roots), without the roots themselves.

    A table is no snapshot: a pid may have passed on while it was read. No child is older than its parent, so one that
    seems to be is another's.
    """
    children: dict[int, list[int]] = {}
    for process in table.values():
        parent = table.get(process.ppid)
        if parent is None or parent.start_time <= process.start_time:
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
    """Undo the octal escapes that C(mountinfo) writes for space, tab, newline and backslash (C(maps) does so for the
    newline alone)."""
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), text)
