# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""The parent of a server that was launched without systemd: keeps its exit status, and its log within bounds.

Runs as C(python3 -I supervise.py NAME), in a session of its own, so that it outlives the connection that launched it.
One JSON object comes in on stdin: argv, environment, cwd, log, exit_file, uid, gid, groups, cgroup, log_limit,
log_keep.
One JSON object goes out on stdout as soon as the server runs (or does not): C(pid) or C(error). Then it waits.

Nothing here touches the server's output: it writes to its log itself, so that a dead parent costs no output.
TERM and INT are passed on to the server; it ends when the server ends.
Standard library only, imports nothing of this collection.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import typing as t

#: Seconds between two looks at the size of the log; the server's end interrupts the wait.
LOOK = 60


def rotate(path: str, keep: int) -> None:
    """Keep the last logs: PATH.1 is the newest. The file itself is copied and cut, because the server has it open."""
    for number in range(keep - 1, 0, -1):
        older = "%s.%d" % (path, number)
        if os.path.exists(older):
            os.replace(older, "%s.%d" % (path, number + 1))
    descriptor = os.open(path + ".1", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as copy, open(path, "rb") as log:
        shutil.copyfileobj(log, copy, 1024 * 1024)
    os.truncate(path, 0)


def start(order: dict[str, t.Any]) -> subprocess.Popen[bytes]:
    """Start the server in its own session, and in its own cgroup if it has one."""
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    if order.get("cgroup"):
        # This process moves, and the server is born there.
        with open(os.path.join(order["cgroup"], "cgroup.procs"), "w") as handle:
            handle.write("0")
    identity: dict[str, t.Any] = {}
    if order.get("uid") is not None:
        identity = {"user": order["uid"], "group": order["gid"], "extra_groups": order["groups"]}
    try:
        return subprocess.Popen(  # pylint: disable=ansible-bad-function
            order["argv"],
            env=order["environment"],
            cwd=order["cwd"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            umask=0o077,
            **identity,
        )
    finally:
        os.close(log)


def leave_status(path: str, pid: int, code: int, started: float) -> None:
    """Write how the server ended (a negative code is a signal), whole or not at all."""
    left = {"pid": pid, "code": code, "seconds": round(time.monotonic() - started, 3), "ended_at": time.time()}
    temporary = path + ".new"
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as handle:
        handle.write(json.dumps(left))
    os.replace(temporary, path)


def main() -> int:
    order = json.loads(sys.stdin.read())
    started = time.monotonic()
    try:
        server = start(order)
    except OSError as error:
        sys.stdout.write(
            json.dumps({"error": "%s: %s" % (error.filename or order["argv"][0], os.strerror(error.errno or 0))})
        )
        return 1
    sys.stdout.write(json.dumps({"pid": server.pid}) + "\n")
    sys.stdout.flush()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)

    def pass_on(number: int, _frame: t.Any) -> None:
        server.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, pass_on)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    watch = select.poll()
    watch.register(os.pidfd_open(server.pid), select.POLLIN)
    while not watch.poll(LOOK * 1000):
        try:
            if os.path.getsize(order["log"]) > order["log_limit"]:
                rotate(order["log"], order["log_keep"])
        except OSError:
            # A full disk or a log that somebody moved: the server matters more.
            continue
    # Passing a signal on may have reaped it already.
    leave_status(order["exit_file"], server.pid, server.wait(), started)
    return 0


if __name__ == "__main__":
    sys.exit(main())  # pylint: disable=ansible-bad-function
