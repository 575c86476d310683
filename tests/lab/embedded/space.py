# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A place of its own for the demo: a PID namespace where the kernel allows it, so that all of it ends with its first
process, and scans see nothing else. Where it does not, orphans are adopted and ended by the demo itself."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

PR_SET_CHILD_SUBREAPER = 36


def unshare() -> list[str] | None:
    """The command that makes the namespace, None where there can be none."""
    common = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    tries = [common] if os.geteuid() == 0 else []
    tries += [[*common, "--user", "--map-current-user"], [*common, "--user", "--map-root-user"]]
    for command in tries:
        try:
            done = subprocess.run([*command, "true"], capture_output=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0:
            return command
    return None


def init(work: Callable[[], int], done_fd: int, keep: bool) -> int:
    """Be the first process of the namespace: run C(work) in a child, reap everything, tell the outside the exit code.

    With C(keep) it stays after the work is done, until it is told to end; when it ends, all in the namespace ends.
    """
    child = os.fork()
    if child == 0:
        os.close(done_fd)
        os._exit(work())
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    code = 1
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            if not keep:
                return code
            signal.pause()
            continue
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os.write(done_fd, bytes([code if 0 <= code < 256 else 1]))
            os.close(done_fd)
            if not keep or code != 0:
                return code


def become_subreaper() -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_of(pid: int) -> list[int]:
    """All living descendants, from /proc."""
    parents: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as handle:
                    fields = handle.read().rsplit(b")", 1)[1].split()
            except OSError:
                continue
            if fields[0] != b"Z":
                parents.setdefault(int(fields[1]), []).append(int(name))
    found, todo = [], [pid]
    while todo:
        below = parents.get(todo.pop(), [])
        found += below
        todo += below
    return found


def end_children(seconds: float = 10.0) -> None:
    """End what was started and is still there: everything below this process."""
    deadline = time.monotonic() + seconds
    while (left := children_of(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.02)


def fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 1
