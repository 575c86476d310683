# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Processes that a check left running: found by their process group, or by a variable of their environment."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

#: Seconds that a process gets to end by itself.
GRACE = 5.0


def end_left_behind(mark: str, group: int | None = None) -> list[str]:
    """End what outlives a check by more than a moment, and tell it as C(PID COMMAND LINE).

    :param mark: C(NAME=VALUE) in the environment of everything that the check started.
    :param group: the check's process group.
    """
    deadline = time.monotonic() + GRACE
    while (left := _members(mark, group)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it ended by itself
    # A master of shared ssh connections waits for the next command, and would have ended by itself.
    return [f"{pid} {line}" for pid, line in sorted(left.items()) if not line.startswith("ssh: ")]


def _members(mark: str, group: int | None) -> dict[int, str]:
    """Command lines by pid, without the process that asks and without zombies."""
    found = {}
    wanted = mark.encode()
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        try:
            state, _parent, its_group = (entry / "stat").read_text(errors="replace").rsplit(")", 1)[1].split()[:3]
            ours = int(its_group) == group or wanted in (entry / "environ").read_bytes().split(b"\0")
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue  # gone meanwhile, or somebody else's
        if ours and state not in "ZX" and pid != os.getpid():
            found[pid] = line[:200]
    return found
