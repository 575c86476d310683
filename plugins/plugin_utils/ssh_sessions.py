# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Private to this collection: no stable interface.
"""Many commands at once through few connections to one hypervisor.

Facts: sshd takes 10 sessions over one connection (MaxSessions) and drops connections at random when more than 10 are
logging in at a time (MaxStartups 10:30:100). All guests of a hypervisor share it, so a play over 50 of them would run
into both. Therefore each command takes the first free place; so many places make a connection; a connection is made by
one process, the others wait for it; and few are made at a time. Who holds what are flocks: they end with their process.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import itertools
import json
import os
import socket
import time
import typing as t
from collections.abc import Callable, Iterator
from pathlib import Path

AT_A_TIME = 5  # connections being made, half of what sshd takes without dropping any


class Hypervisor:
    """The connections of this user to one hypervisor.

    folder: where their sockets are, exists. key: names the hypervisor and the way to log in. sessions: commands at a
    time over one connection.
    """

    def __init__(self, folder: Path, key: str, sessions: int) -> None:
        self.folder = folder
        self.key = key
        self.sessions = sessions

    @contextlib.contextmanager
    def place(self) -> Iterator[Path]:
        """A place for one command while the context lasts: the socket of the connection to use."""
        for number in itertools.count():
            with contextlib.ExitStack() as held:
                file = held.enter_context(self._file(f"place{number}"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                yield self.socket(number // self.sessions)
                return

    def socket(self, connection: int) -> Path:
        return self.folder / f"{self.key}-{connection}"

    def sockets(self) -> list[Path]:
        """Those that answer."""
        found = glob.glob(f"{glob.escape(str(self.folder / self.key))}-*")
        return [path for path in map(Path, sorted(found)) if answers(path)]

    def connected(self, path: Path, connect: Callable[[], t.Any], failure: type[Exception]) -> None:
        """Make sure that the connection of this socket is there; `connect` makes it and raises `failure`.

        Who waited while another one failed fails with it, rather than wait for the same silence again.
        """
        if answers(path):
            return
        asked = time.time()
        turn = int(path.name.rpartition("-")[2]) % AT_A_TIME
        with self._file(f"turn{turn}") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if answers(path):
                return
            failed = json.loads(file.read() or "{}")
            if failed.get("at", 0) >= asked:
                raise failure(failed["problem"])
            note: dict[str, t.Any] = {}
            try:
                connect()
            except failure as error:
                note = {"at": time.time(), "problem": str(error)}
                raise
            finally:
                file.seek(0)
                file.truncate()
                json.dump(note, file)
                file.flush()

    def _file(self, name: str) -> t.TextIO:
        descriptor = os.open(self.folder / f"{self.key}.{name}", os.O_RDWR | os.O_CREAT, 0o600)
        return os.fdopen(descriptor, "r+", encoding="utf-8")


def answers(path: Path) -> bool:
    """Whether somebody listens at this socket; a killed ssh leaves its socket behind."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
