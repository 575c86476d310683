# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Two operators, one node: who is at work here, since when.

Inside a module an flock keeps others out and dies with the process. Between the tasks of one playbook run a lease file
in C(RUN_DIR) does: it names the run, and lapses if nobody renews it. Time is CLOCK_BOOTTIME of one boot, so that a
jumping wall clock neither breaks nor prolongs it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import typing as t

from ..common.clock import Clock
from ..common.errors import CleanslateError
from ..common.text import show
from ..proc.table import ProcFS
from .files import Locked, locked, make_dir, read_bytes, remove, write_atomic

#: Seconds that a lease lives after its last renewal: longer than the gap between two tasks of a play.
LIFETIME = 300.0


class LeaseHeld(CleanslateError):
    """Another run works on this node."""


class LeaseInfo(t.NamedTuple):
    run: str
    #: Wall clock, seconds since the epoch: for people.
    since: float
    #: Seconds that it still lives.
    left: float


class Lease:
    """The lease of one node.

    C(run) is the run's id (C(user@control-node:…)); None means a module called on its own, which holds a lease only
    while it works.
    """

    def __init__(
        self,
        run_dir: str = "/run/cleanslate",
        run: str | None = None,
        lifetime: float = LIFETIME,
        fs: ProcFS | None = None,
        boottime: t.Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self.run_dir = run_dir
        self.run = run
        self.lifetime = lifetime
        self.path = os.path.join(run_dir, "lease.json")
        self._boot_id = (fs or ProcFS()).boot_id()
        self._boottime = boottime

    def current(self) -> LeaseInfo | None:
        """The live lease of this node, whoever has it."""
        raw = read_bytes(self.path)
        if raw is None:
            return None
        try:
            data = json.loads(raw.decode("utf-8"))
            left = float(data["expires"]) - self._boottime()
            if data["boot_id"] != self._boot_id or left <= 0:
                return None
            return LeaseInfo(str(data["run"]), float(data["since"]), min(left, self.lifetime))
        except (ValueError, KeyError, TypeError):
            return None

    def check(self) -> None:
        """Raise LeaseHeld if another run's lease stands. Changes nothing."""
        held = self.current()
        if held is not None and held.run != self.run:
            raise LeaseHeld(
                "%s is at work on this node since %s (its lease lapses %d s after its last step). Wait for it, or look "
                "whether that run still lives."
                % (show(held.run), time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(held.since)), round(held.left)),
                lease={"run": show(held.run), "since": held.since, "left": round(held.left)},
            )

    def _write(self, run: str) -> None:
        held = self.current()
        since = held.since if held is not None and held.run == run else time.time()
        data = {"run": run, "since": since, "boot_id": self._boot_id, "expires": self._boottime() + self.lifetime}
        write_atomic(self.path, json.dumps(data).encode("utf-8"), 0o644)

    def release(self) -> bool:
        """Drop this run's lease; returns whether there was one. Another run's lease is left alone."""
        held = self.current()
        if held is None or held.run != self.run:
            return False
        return remove(self.path)

    @contextlib.contextmanager
    def held(self, timeout: float = 0.0, release: bool = False, clock: Clock | None = None) -> t.Iterator[None]:
        """Hold the node while a destructive module works.

        Waits at most C(timeout) seconds. With a run id the lease is renewed at the start and at the end and stays
        (unless C(release)); without one it goes with the module. Raises LeaseHeld when another run has the node.
        """
        clock = clock or Clock()
        started = clock.now()
        make_dir(self.run_dir, 0o755)
        lock = os.path.join(self.run_dir, "lock")
        while True:
            try:
                with locked(lock, max(0.0, timeout - (clock.now() - started)), clock):
                    self.check()
                    run = self.run or "a module on its own (pid %d)" % os.getpid()
                    self._write(run)
                    try:
                        yield
                    finally:
                        if release or self.run is None:
                            remove(self.path)
                        else:
                            self._write(run)
                    return
            except Locked:
                self.check()
                raise LeaseHeld("Another module of this collection is at work on this node (%s)." % lock) from None
            except LeaseHeld:
                if clock.now() - started >= timeout:
                    raise
                clock.pause(0.2)
