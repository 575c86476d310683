# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""End the targets of a plan, and nothing else: stop units, TERM, CONT if stopped, KILL, look again, within a time.

Every signal goes through a pidfd that was compared with the planned start time, so a successor with the same pid never
gets one. Waiting is on those pidfds: it returns at the last exit.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import typing as t

from ..common.clock import Clock
from ..common.errors import CleanslateError
from ..common.text import show
from ..proc.identity import Handle, Identity, Kernel
from .diagnosis import diagnose
from .mps import Mps
from .plan import Item, Memory, Plan, UnitStop
from .reader import Reader
from .restarter import may_restart, name_restarter
from .units import StopJob, Systemd, UnitKey

#: Longest wait without asking whether anybody still reads.
_SLICE = 0.5
#: First pause before a KILL is repeated; each next one is twice as long, up to the last.
_FIRST_PAUSE = 0.5
_LAST_PAUSE = 8.0
#: How long a parent that may start its children again is watched after they have ended.
_LINGER = 0.5
#: How often a restarter may put a new process in place of the ended before we give up on it.
_GENERATIONS = 3


class Limits(t.NamedTuple):
    """Seconds: from TERM to KILL, and from the first signal to giving up."""

    term_timeout: float = 10.0
    kill_timeout: float = 60.0

    def check(self) -> Limits:
        """Raises CleanslateError naming the option when they make no sense."""
        if not 0 <= self.term_timeout < float("inf"):
            raise CleanslateError(
                "term_timeout: must be 0 or more seconds (0 means KILL at once).", option="term_timeout"
            )
        if not 0 < self.kill_timeout < float("inf"):
            raise CleanslateError("kill_timeout: must be more than 0 seconds.", option="kill_timeout")
        if self.kill_timeout <= self.term_timeout:
            raise CleanslateError(
                "kill_timeout: %g s counts from the first signal, so it must be more than term_timeout (%g s), or KILL "
                "would never be sent." % (self.kill_timeout, self.term_timeout),
                option="kill_timeout",
            )
        return self


class _Live:
    """A target that has not ended yet."""

    def __init__(self, item: Item, handle: Handle, row: dict[str, t.Any]) -> None:
        self.item = item
        self.handle = handle
        self.row = row
        self.first: float | None = None
        #: The last signal's name, C(unit) while its unit's manager ends it, empty before the first.
        self.sent = ""
        #: The unit whose manager is ending it.
        self.unit: UnitKey | None = None
        self.due: float | None = None
        self.pause = _FIRST_PAUSE


class Outcome:
    """What happened."""

    def __init__(self) -> None:
        self.killed: list[dict[str, t.Any]] = []
        self.survivors: list[dict[str, t.Any]] = []
        self.changed_identity: list[dict[str, t.Any]] = []
        self.stopped_units: list[str] = []
        self.warnings: list[str] = []
        self.elapsed = 0.0
        #: Empty when everything has ended.
        self.reason = ""
        self.message = ""

    @property
    def changed(self) -> bool:
        return bool(self.killed or self.stopped_units or self.survivors)


def _raise_file_limit(wanted: int) -> None:
    """One descriptor for each target: 1,024 may be too few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + 256
    if soft != resource.RLIM_INFINITY and soft < needed:
        ceiling = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling, hard))


class _Ender:
    def __init__(
        self,
        rescan: t.Callable[[Memory], Plan],
        limits: Limits,
        kernel: Kernel,
        systemd: Systemd,
        clock: Clock,
        reader: Reader,
        mps: Mps,
    ) -> None:
        self.rescan = rescan
        self.limits = limits
        self.kernel = kernel
        self.systemd = systemd
        self.clock = clock
        self.reader = reader
        self.mps = mps
        self.live: dict[Identity, _Live] = {}
        self.known: set[Identity] = set()
        #: Living parents of targets that are no targets and may start them again.
        self.parents: set[Identity] = set()
        self.units: set[str] = set()
        self.memory = Memory()
        self.outcome = Outcome()
        self.began = clock.now()
        #: When the first signal went out, or the first unit was told to stop.
        self.first: float | None = None
        self.generation = 0
        self.rescan_pause = _FIRST_PAUSE

    # -- pieces -------------------------------------------------------------------------------------------------

    def admit(self, plan: Plan) -> int:
        """Take over a plan's targets; returns how many were new."""
        self.memory.add(plan)
        _raise_file_limit(len(self.live) + len(plan.targets))
        fresh: list[_Live] = []
        targets = plan.target_pids
        for item in plan.targets:
            identity = item.identity
            if identity in self.known:
                continue
            self.known.add(identity)
            row = plan.row(item, "target")
            handle = self.kernel.open(identity)
            if handle is None:
                if self.kernel.present(identity.pid):
                    self.outcome.changed_identity.append(
                        dict(
                            row, decision="spared", reason="changed_identity", detail="another process has this pid now"
                        )
                    )
                continue
            fresh.append(_Live(item, handle, row))
            parent = plan.survey.table.get(item.process.ppid)
            bystander = parent is not None and parent.pid > 1 and parent.pid not in targets | plan.survey.own_pids
            if parent is not None and bystander and may_restart(parent):
                self.parents.add(Identity(parent.pid, parent.start_time))
        # Before anything is signalled: may all of it be?
        for live in fresh:
            self.live[live.item.identity] = live
            self.kernel.may_signal(live.handle)
        return len(fresh)

    def send(self, live: _Live, number: signal.Signals) -> None:
        self.reader.check()
        now = self.clock.now()
        if self.first is None:
            self.first = now
        if live.first is None:
            live.first = now
        if self.kernel.signal(live.handle, number) and number != signal.SIGCONT:
            live.sent = number.name[3:]

    def act(self, live: _Live) -> None:
        """The next step for one target, when it is due."""
        now = self.clock.now()
        if live.due is not None and now < live.due:
            return
        if live.first is None and self.limits.term_timeout > 0:
            self.send(live, signal.SIGTERM)
            process = self.kernel.look(live.item.identity)
            if process is not None and process.state in ("T", "t"):
                # A stopped process handles TERM only when it goes on.
                self.send(live, signal.SIGCONT)
            live.due = now + self.limits.term_timeout
        else:
            self.send(live, signal.SIGKILL)
            live.due = now + live.pause
            live.pause = min(live.pause * 2, _LAST_PAUSE)

    def reap(self, seconds: float) -> None:
        """Wait for exits, at most C(seconds)."""
        for handle in self.kernel.wait([live.handle for live in self.live.values()], seconds):
            live = self.live.pop(handle.identity)
            handle.close()
            took = 0.0 if live.first is None else self.clock.now() - live.first
            # Without a signal of its own: it went with another one that got one.
            if self.first is not None:
                self.outcome.killed.append(dict(live.row, decision="ended", signal=live.sent, seconds=round(took, 3)))

    @property
    def left(self) -> float:
        if self.first is None:
            return self.limits.kill_timeout
        return max(0.0, self.first + self.limits.kill_timeout - self.clock.now())

    # -- units --------------------------------------------------------------------------------------------------

    def stop_units(self, stops: t.Sequence[UnitStop]) -> None:
        """Through their managers, and for at most term_timeout; what is left then is signalled like the others."""
        jobs: list[StopJob] = []
        for stop in stops:
            if str(stop.key) in self.units:
                continue
            self.reader.check()
            job = self.systemd.stop(stop.key)
            if job is None:
                self.outcome.warnings.append("%s cannot be stopped through systemctl." % str(stop.key))
                continue
            self.units.add(str(stop.key))
            jobs.append(job)
            now = self.clock.now()
            self.first = now if self.first is None else self.first
            for live in self.live.values():
                if live.item.process.pid in stop.pids:
                    live.first, live.sent, live.due = now, "unit", now + self.limits.term_timeout
                    live.unit = stop.key
            self.outcome.stopped_units.append(str(stop.key))
        until = self.clock.now() + max(self.limits.term_timeout, 1.0)
        try:
            while any(not job.done for job in jobs) and self.clock.now() < until:
                self.reader.check()
                if any(live.sent == "unit" for live in self.live.values()):
                    self.reap(0.05)
                else:
                    self.clock.pause(0.02)
        finally:
            finished = {job.key for job in jobs if job.done}
            for job in jobs:
                if job.failed:
                    self.outcome.stopped_units.remove(str(job.key))
                    self.outcome.warnings.append("`%s` failed: %s" % (" ".join(job.key.stop_command), job.error()))
                job.give_up()
        # Its own manager has let them go: whoever is left has to be told.
        for live in self.live.values():
            if live.sent == "unit" and live.unit in finished:
                live.first, live.sent, live.due = None, "", None

    def end_mps_work(self, plan: Plan) -> None:
        """Through the control daemon, before its clients are signalled."""
        owners = [plan.survey.attribution(live.item.process) for live in self.live.values()]
        for daemon in plan.mps if owners else ():
            self.reader.check()
            # A daemon knows its clients by the pids of its own machine or container.
            pids = {owner.host_pid for owner in owners}
            if daemon.container:
                pids = {owner.guest_pid for owner in owners if owner.container_id == daemon.container}
            self.outcome.warnings += self.mps.terminate(daemon, pids)

    # -- the whole ----------------------------------------------------------------------------------------------

    def run(self, plan: Plan) -> Outcome:
        try:
            self.reader.check()
            self.admit(plan)
            # First the work of MPS clients: stopping their unit signals them.
            self.end_mps_work(plan)
            self.stop_units(plan.units)
            self.loop()
        except CleanslateError as error:
            # What was done so far must be known.
            done = {"killed": self.outcome.killed, "stopped_units": self.outcome.stopped_units}
            error.details.update(done, changed=self.outcome.changed)
            raise
        finally:
            for live in self.live.values():
                live.handle.close()
            self.outcome.elapsed = round(self.clock.now() - self.began, 3)
        return self.outcome

    def loop(self) -> None:
        look_again = self.clock.now() + self.limits.term_timeout
        while True:
            self.reader.check()
            if not self.live:
                if self.known and not self.another_generation():
                    return
                if not self.known:
                    return
                continue
            if self.first is not None and self.left <= 0:
                self.fail_unkillable()
                return
            for live in list(self.live.values()):
                self.act(live)
            now = self.clock.now()
            if now >= look_again:
                # While something resists, its helpers may come up anew.
                look_again = now + self.rescan_pause
                self.rescan_pause = min(self.rescan_pause * 2, _LAST_PAUSE)
                if self.admit(self.rescan(self.memory)):
                    continue
            due = min([live.due for live in self.live.values() if live.due is not None] + [look_again])
            self.reap(min(_SLICE, self.left, max(0.0, due - now)))

    def successors(self) -> Plan | None:
        """All have ended. The plan of those that came since, None when there are none.

        A living parent that may start them again is given the moment that it needs.
        """
        until = self.clock.now() + _LINGER
        while True:
            plan = self.rescan(self.memory)
            if self.admit(plan):
                return plan
            # Only such parents are waited for, and only as long as there is one.
            if not any(map(self.lives, self.parents)) or self.clock.now() >= until:
                return None
            self.reader.check()
            self.clock.pause(_LINGER / 5)

    def lives(self, identity: Identity) -> bool:
        """Whether a process can still do something: one that has ended and is not reaped cannot."""
        process = self.kernel.look(identity)
        return process is not None and not process.zombie

    def another_generation(self) -> bool:
        """All have ended: is there anybody new? Returns whether there is more to do."""
        plan = self.successors()
        if plan is None:
            return False
        self.generation += 1
        if self.generation >= _GENERATIONS:
            self.fail_respawned(plan)
            return False
        self.stop_units(plan.units)
        return True

    def fail_respawned(self, plan: Plan) -> None:
        texts = []
        for live in self.live.values():
            named = name_restarter(live.item.process, plan)
            text = named.text if named is not None else "whatever started it is not in sight"
            self.outcome.survivors.append(
                dict(
                    live.row,
                    decision="survivor",
                    reason="respawned",
                    signal=live.sent,
                    restarter="" if named is None else named.what,
                    stop_command="" if named is None else named.command,
                )
            )
            texts.append("%d (%s): %s" % (live.item.process.pid, show(live.item.process.comm), text))
        self.outcome.reason = "respawned"
        self.outcome.message = "Ended processes come back. %s" % "; ".join(dict.fromkeys(texts))

    def fail_unkillable(self) -> None:
        texts = []
        for live in self.live.values():
            seen = diagnose(self.kernel.fs, live.item.identity)
            took = 0.0 if live.first is None else self.clock.now() - live.first
            self.outcome.survivors.append(
                dict(
                    live.row,
                    decision="survivor",
                    reason="unkillable",
                    signal=live.sent,
                    seconds=round(took, 3),
                    state=seen.state,
                    wchan=seen.wchan,
                    stack=seen.stack,
                    advice=seen.advice,
                )
            )
            texts.append(
                "process %d (%s) is in state %s, waiting in %s. %s"
                % (
                    live.item.process.pid,
                    show(live.item.process.comm),
                    seen.state or "?",
                    seen.wchan or "?",
                    seen.advice,
                )
            )
        self.outcome.reason = "unkillable"
        self.outcome.message = "Not ended within %g s: %s" % (self.limits.kill_timeout, " ".join(texts))


def end(
    plan: Plan,
    rescan: t.Callable[[Memory], Plan],
    limits: Limits | None = None,
    kernel: Kernel | None = None,
    systemd: Systemd | None = None,
    clock: Clock | None = None,
    reader: Reader | None = None,
    mps: Mps | None = None,
) -> Outcome:
    """End every target of C(plan) and whoever C(rescan) finds in its scope meanwhile.

    Returns when all have ended, when kill_timeout seconds have passed since the first signal (C(outcome.reason) is
    C(unkillable)), or when somebody keeps starting them again (C(respawned)). Raises ReaderGone when nobody reads the
    result any more, and CleanslateError before the first signal when one of them may not be signalled.
    """
    ender = _Ender(
        rescan,
        (limits or Limits()).check(),
        kernel or Kernel(),
        systemd or Systemd(),
        clock or Clock(),
        reader or Reader(),
        mps or Mps(),
    )
    return ender.run(plan)
