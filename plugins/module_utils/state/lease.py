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
import math
import os
import time
import typing as t

from ..common.clock import Clock, Deadline
from ..common.errors import CleanslateError
from ..common.text import show
from ..proc.table import Hidden, ProcFS, Vanished
from .files import Locked, check_dir, ensure_dir, locked, read_bytes, remove, write_atomic

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
    while it works. Every method raises CleanslateError when C(run_dir) is not to be trusted or the lease cannot be
    read: who cannot tell whether another is at work must not begin.
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
        self.run = run or None
        self.lifetime = lifetime
        self.path = os.path.join(run_dir, "lease.json")
        self.lock = os.path.join(run_dir, "lock")
        self._fs = fs or ProcFS()
        self._boottime = boottime

    def current(self) -> LeaseInfo | None:
        """The live lease of this node, whoever has it."""
        raw = read_bytes(self.path, trusted=True) if check_dir(self.run_dir, "run_dir") else None
        if raw is None:
            return None
        try:
            data = json.loads(raw.decode("utf-8"))
            run, since, left = str(data["run"]), float(data["since"]), float(data["expires"]) - self._boottime()
            holder = (int(data["pid"]), int(data["start_time"])) if "pid" in data else None
            if not math.isfinite(left) or not 0 <= since < 1e11:
                raise ValueError(since)
            other_boot = data["boot_id"] != self._fs.boot_id()
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            raise CleanslateError(
                "%s is damaged, so whether another run is at work cannot be told. Look, and remove it."
                % show(self.path)
            ) from None
        if other_boot or left <= 0 or (holder is not None and not self._lives(*holder)):
            return None
        return LeaseInfo(run, since, min(left, self.lifetime))

    def _lives(self, pid: int, start_time: int) -> bool:
        """Whether the module that holds a lease of its own still runs: one that was killed could not drop it."""
        try:
            process = self._fs.process(pid)
        except Hidden:
            return True
        except Vanished:
            return False
        return process.start_time == start_time and not process.zombie

    def check(self) -> None:
        """Raise LeaseHeld if another run's lease stands. Changes nothing."""
        held = self.current()
        if held is not None and held.run != self.run:
            raise LeaseHeld(
                "%s is at work on this node since %s (its lease lapses %d s after its last step). Wait for it, or, "
                "once you know that this run is dead, drop its lease: module cleanslate.inference.lease, state=absent "
                "lease='%s' run_dir='%s'."
                % (
                    show(held.run),
                    time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(held.since)),
                    round(held.left),
                    show(held.run),
                    self.run_dir,
                ),
                lease={"run": show(held.run), "since": held.since, "left": round(held.left)},
            )

    def _write(self) -> None:
        held = self.current()
        since = held.since if held is not None and held.run == self.run else time.time()
        expires = self._boottime() + self.lifetime
        data = {"run": self.run, "since": since, "boot_id": self._fs.boot_id(), "expires": expires}
        if self.run is None:
            pid = os.getpid()
            data["run"] = "a module on its own (pid %d)" % pid
            with contextlib.suppress(Vanished):
                data.update(start_time=self._fs.process(pid).start_time, pid=pid)
        write_atomic(self.path, json.dumps(data).encode("utf-8"), 0o644)

    def release(self) -> bool:
        """Drop this run's lease; returns whether there was one. Another run's lease is left alone."""
        held = self.current()
        if held is None or held.run != self.run:
            return False
        # Under the lock, so that it is not one that another run takes at this moment; if a module of this run is still
        # at work, which has the lock, nobody can.
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(Locked):
                stack.enter_context(locked(self.lock))
            held = self.current()
            return held is not None and held.run == self.run and remove(self.path)

    @contextlib.contextmanager
    def held(self, timeout: float = 0.0, release: bool = False, clock: Clock | None = None) -> t.Iterator[None]:
        """Hold the node while a destructive module works.

        Waits at most C(timeout) seconds. With a run id the lease is renewed at the start and at the end and stays
        (unless C(release)); without one it goes with the module. Raises LeaseHeld when another run has the node.
        """
        if not 0 <= timeout < float("inf"):
            raise CleanslateError("lock_timeout: must be 0 or more seconds (0 means do not wait).")
        ensure_dir(self.run_dir, "run_dir")
        with contextlib.ExitStack() as stack:
            self._enter(stack, Deadline(clock or Clock(), timeout))
            self._write()
            try:
                yield
            except BaseException:
                with contextlib.suppress(CleanslateError):  # the work's own failure is the one to report
                    self._leave(release)
                raise
            self._leave(release)

    def _enter(self, stack: contextlib.ExitStack, deadline: Deadline) -> None:
        """Get the lock while no other run's lease stands."""
        while True:
            try:
                # First without the lock: who waits for a lease must not be in the way of the one who has it.
                self.check()
                with contextlib.ExitStack() as lock:
                    lock.enter_context(locked(self.lock, deadline.left, deadline.clock))
                    self.check()
                    stack.push(lock.pop_all())
                return
            except Locked:
                self.check()
                raise LeaseHeld(
                    "Another module of this collection is at work on this node (it has %s)." % show(self.lock)
                ) from None
            except LeaseHeld:
                if deadline.over:
                    raise
                deadline.clock.pause(min(0.2, deadline.left))

    def _leave(self, release: bool) -> None:
        if release or self.run is None:
            remove(self.path)
        else:
            self._write()
