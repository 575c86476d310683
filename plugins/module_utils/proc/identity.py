# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""A process that cannot be confused with its successor: pid and start time, held by a pidfd.

A pidfd refers to one process for ever (pidfd_open(2), Linux 5.3): opened first and compared with the start time after,
a signal through it can never reach another process that got the same pid.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import select
import signal
import sys
import typing as t

from ..common.errors import CleanslateError
from .table import Hidden, Process, ProcFS, Vanished


class Identity(t.NamedTuple):
    pid: int
    start_time: int


class Handle:
    """An open pidfd of one identity. Close it, or use it as a context manager."""

    def __init__(self, identity: Identity, fd: int) -> None:
        self.identity = identity
        self.fd = fd

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _hidden(pid: int) -> CleanslateError:
    return CleanslateError(
        "Process %d is hidden from this user (hidepid). Run the play with become: true." % pid, pid=pid
    )


class Kernel:
    """The calls that change or watch processes: the one seam that tests replace."""

    def __init__(self, fs: ProcFS | None = None) -> None:
        self.fs = fs or ProcFS()

    def open(self, identity: Identity) -> Handle | None:
        """A handle of exactly this process; None when it is gone or its pid belongs to another one now.

        Raises CleanslateError when that cannot be told: hidden from this user, no descriptor left, no pidfds.
        """
        try:
            fd = os.pidfd_open(identity.pid)
        except OverflowError:  # such as 4294967295, which drivers report
            return None
        except OSError as error:
            # ENOENT and EINVAL: what has this number is a thread, or no number of a process.
            if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENOENT):
                return None
            raise CleanslateError(
                "Process %d cannot be watched: %s." % (identity.pid, os.strerror(error.errno or 0)), pid=identity.pid
            ) from None
        handle = Handle(identity, fd)
        try:
            if self.look(identity) is not None:
                return handle
            # hidepid=2 denies that it exists, but its pidfd says that it lives.
            if not self.present(identity.pid) and not self.wait([handle], 0):
                raise _hidden(identity.pid)
        except BaseException:
            handle.close()
            raise
        handle.close()
        return None

    def signal(self, handle: Handle, number: int) -> bool:
        """Send one signal. False when the process is gone; raises CleanslateError when it may not be signalled.

        Never to the first process: its end is the end of the machine or the container.
        """
        if handle.identity.pid <= 1:
            raise CleanslateError("Process %d is never signalled." % handle.identity.pid, pid=handle.identity.pid)
        try:
            signal.pidfd_send_signal(handle.fd, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            raise CleanslateError(
                "Process %d may not be signalled by this user. Run the play with become: true, or limit users."
                % handle.identity.pid,
                pid=handle.identity.pid,
            ) from None
        return True

    def may_signal(self, handle: Handle) -> None:
        """Ask without doing. Raises CleanslateError when this process may not be signalled."""
        self.signal(handle, 0)

    def look(self, identity: Identity) -> Process | None:
        """The process as it is now; None when it is gone or its pid belongs to another one.

        Raises CleanslateError when this user may not know.
        """
        try:
            process = self.fs.process(identity.pid)
        except Hidden:
            raise _hidden(identity.pid) from None
        except Vanished:
            return None
        return process if process.start_time == identity.start_time else None

    def present(self, pid: int) -> bool:
        """Whether any process has this pid now."""
        try:
            self.fs.process(pid)
        except Hidden:
            return True
        except Vanished:
            return False
        return True

    def wait(self, handles: t.Sequence[Handle], seconds: float) -> list[Handle]:
        """Wait until at least one has ended, at most C(seconds); returns those that have ended.

        A pidfd is readable once the whole thread group is dead, a zombie included; not while any thread lives.
        """
        poller = select.poll()
        by_fd = {handle.fd: handle for handle in handles}
        for fd in by_fd:
            poller.register(fd, select.POLLIN)
        ready = poller.poll(max(0.0, seconds) * 1000)
        # A closed descriptor polls as ready too, and would pass for a process that has ended.
        if any(event & select.POLLNVAL for _fd, event in ready):
            raise ValueError("a handle in wait() is closed")
        return [by_fd[fd] for fd, _event in ready]


def require_kernel(release: str | None = None) -> None:
    """Refuse kernels and interpreters without pidfds, by name. Raises CleanslateError before anything is done."""
    release = release or platform.release()
    match = re.match(r"(\d+)\.(\d+)", release)
    if match and (int(match.group(1)), int(match.group(2))) < (5, 3):
        raise CleanslateError(
            "Linux %s is too old: signalling exactly one process needs pidfds, Linux 5.3 or later." % release
        )
    if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
        raise CleanslateError(
            "This Python (%s, %s) has no pidfds: use one of version 3.9 or later that was built on Linux 5.3 or later "
            "(ansible_python_interpreter)." % (sys.executable, platform.python_version())
        )
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        raise CleanslateError(
            "pidfds are refused here (%s): allow pidfd_open and pidfd_send_signal in the container's seccomp profile."
            % os.strerror(error.errno or 0)
        ) from None
