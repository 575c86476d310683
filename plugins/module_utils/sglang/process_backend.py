# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Back end C(process): a server on a node without systemd, in a session (and where possible a cgroup) of its own."""

from __future__ import annotations

import errno
import json
import os
import select
import subprocess
import sys
import typing as t

from ..common.errors import CleanslateError
from ..common.text import show
from ..proc.table import ProcFS, Vanished
from ..state.files import make_dir, read_bytes, remove, write_atomic
from .account import Account
from .paths import Paths
from .sources import source_of
from .supervise import rotate

LOG_LIMIT = 256 * 1024 * 1024
LOG_KEEP = 5
CGROUP_ROOT = "/sys/fs/cgroup"
#: Seconds for the supervisor to say that the server runs: one fork and one exec.
START_TIMEOUT = 20.0


class Started(t.NamedTuple):
    pid: int
    start_time: int
    pgrp: int
    supervisor: int
    #: Path as /proc/PID/cgroup shows it, empty without one.
    cgroup: str


def own_cgroup(name: str, root: str = CGROUP_ROOT) -> str:
    """Make a cgroup for the instance in the unified hierarchy; its folder, or empty where that is not possible.

    Without one, processes are still known by their environment and process group.
    """
    if not os.path.exists(os.path.join(root, "cgroup.controllers")):
        return ""
    folder = os.path.join(root, "cleanslate", name)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return ""
    return folder if os.access(os.path.join(folder, "cgroup.procs"), os.W_OK) else ""


def start(
    name: str,
    argv: t.Sequence[str],
    environment: t.Mapping[str, str],
    where: Paths,
    account: Account,
    cgroup: str = "",
    fs: ProcFS | None = None,
) -> Started:
    """Start the server under its supervisor. Raises CleanslateError when it cannot be started at all."""
    make_dir(os.path.dirname(where.supervisor), 0o755)
    write_atomic(where.supervisor, source_of("supervise").encode("utf-8"), 0o644)
    remove(where.exit_file)
    try:
        if os.path.exists(where.log):
            rotate(where.log, LOG_KEEP)
    except OSError as error:
        raise CleanslateError("%s cannot be rotated: %s." % (where.log, os.strerror(error.errno or 0))) from None
    order = {
        "argv": list(argv),
        "environment": dict(environment),
        "cwd": account.home if os.path.isdir(account.home) else "/",
        "log": where.log,
        "exit_file": where.exit_file,
        "uid": account.uid if account.other else None,
        "gid": account.gid,
        "groups": account.groups if account.other else [],
        "cgroup": cgroup,
        "log_limit": LOG_LIMIT,
        "log_keep": LOG_KEEP,
    }
    # The supervisor carries the instance's name, so that it is known as part of it, and nothing else of the server's.
    supervisor = subprocess.Popen(  # pylint: disable=ansible-bad-function
        [sys.executable, "-I", where.supervisor, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "CLEANSLATE_INSTANCE": name},
        start_new_session=True,
    )
    said = _converse(supervisor, json.dumps(order).encode("utf-8"), START_TIMEOUT)
    if "pid" not in said:
        supervisor.wait()
        raise CleanslateError("The server could not be started: %s." % show(str(said.get("error", "no answer"))))
    pid = int(said["pid"])
    cgroup_path = cgroup[len(CGROUP_ROOT) :] if cgroup else ""
    try:
        process = (fs or ProcFS()).process(pid)
    except Vanished:
        # It ended within milliseconds; server_ready tells why.
        return Started(pid, 0, pid, supervisor.pid, cgroup_path)
    return Started(pid, process.start_time, pid, supervisor.pid, cgroup_path)


def _converse(child: subprocess.Popen, order: bytes, timeout: float) -> dict[str, t.Any]:
    """Hand the order over and read one line. The supervisor lives on, so there is no end of output to wait for."""
    if child.stdin is None or child.stdout is None:
        return {}
    try:
        child.stdin.write(order)
        child.stdin.close()
    except OSError as error:
        if error.errno != errno.EPIPE:
            raise
    ready, _w, _x = select.select([child.stdout], [], [], timeout)
    line = child.stdout.readline() if ready else b""
    child.stdout.close()
    try:
        return dict(json.loads(line.decode("utf-8")))
    except ValueError:
        return {}


def exit_status(where: Paths, pid: int) -> dict[str, t.Any] | None:
    """How the server of this pid ended, as its supervisor wrote it; None when nobody did."""
    raw = read_bytes(where.exit_file)
    if raw is None:
        return None
    try:
        left = json.loads(raw.decode("utf-8"))
    except ValueError:
        return None
    return left if isinstance(left, dict) and left.get("pid") == pid else None
