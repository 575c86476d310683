# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Private to this collection: no stable interface.
"""Who waits for a command on this control node, as one word that a later run can judge: NODE/MACHINE/PID/START."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import os
import re
import socket
from pathlib import Path


class State(enum.Enum):
    """What is known of a waiter."""

    WAITS = "it is there"
    GONE = "it is not"
    ELSEWHERE = "it is on another machine, or in another process namespace"


@dataclasses.dataclass(frozen=True)
class Waiter:
    node: str
    machine: str
    pid: int
    start: str

    def __str__(self) -> str:
        return f"{self.node}/{self.machine}/{self.pid}/{self.start}"

    @classmethod
    def read(cls, word: str) -> Waiter | None:
        found = re.fullmatch(r"([^/\s]+)/([0-9a-f]+)/(\d+)/(\d*)", word)
        return cls(found[1], found[2], int(found[3]), found[4]) if found else None

    def state(self) -> State:
        if self.machine != machine():
            return State.ELSEWHERE
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return State.GONE
        except PermissionError:
            pass
        return State.WAITS if start_time(self.pid) == self.start else State.GONE


def myself() -> Waiter:
    node = re.sub(r"[^\w.-]", "_", socket.gethostname()) or "-"
    return Waiter(node, machine(), os.getpid(), start_time(os.getpid()))


@functools.cache
def machine() -> str:
    """This boot of this machine, and this process namespace: where a pid means the same process."""
    known = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            known.append(os.readlink(path) if path.endswith("/pid") else Path(path).read_text(encoding="ascii"))
        except OSError:
            known.append("")  # not Linux: the name has to do
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:8]


def start_time(pid: int) -> str:
    """In clock ticks since the machine's boot; empty where that cannot be had."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]
