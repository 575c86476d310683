# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A kernel, a systemd and a reader whose every move the test decides and sees."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Any

from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.survey import Surveyor
from ansible_collections.cleanslate.inference.plugins.module_utils.proc.identity import Handle, Identity, Kernel
from ansible_collections.cleanslate.inference.plugins.module_utils.proc.table import ProcFS
from ansible_collections.cleanslate.inference.plugins.module_utils.teardown.end import Limits, Outcome, end
from ansible_collections.cleanslate.inference.plugins.module_utils.teardown.plan import (
    Extras,
    Memory,
    Plan,
    PlanOptions,
    make_plan,
)
from ansible_collections.cleanslate.inference.plugins.module_utils.teardown.reader import Reader, ReaderGone
from ansible_collections.cleanslate.inference.plugins.module_utils.teardown.units import Systemd, UnitKey, UnitState

from ..proctree import FakeClock, ProcTree

KILL, TERM, CONT = signal.SIGKILL, signal.SIGTERM, signal.SIGCONT


class FakeHandle(Handle):
    def close(self) -> None:
        self.fd = -1


class FakeKernel(Kernel):
    """Processes of a fixture tree. Each ends C(delay) seconds after the first of C(deadly) that it gets."""

    def __init__(self, tree: ProcTree, clock: FakeClock) -> None:
        super().__init__(ProcFS(str(tree.proc)))
        self.tree = tree
        self.clock = clock
        #: (seconds since the start, pid, signal) of every signal that reached a process.
        self.sent: list[tuple[float, int, int]] = []
        self.began = clock.now()
        self.deadly: dict[int, dict[int, float]] = {}
        self.ends_at: dict[int, float] = {}
        self.on_end: Callable[[int], None] = lambda pid: None
        self.before_signal: Callable[[int, int], None] = lambda pid, number: None
        self.forbidden: set[int] = set()
        self._fd = 100

    def behave(self, pid: int, **delays: float) -> None:
        """C(TERM=1.5): ends 1.5 s after TERM. A signal that is not named has no effect."""
        self.deadly[pid] = {int(signal.Signals["SIG" + name]): delay for name, delay in delays.items()}

    def open(self, identity: Identity) -> Handle | None:
        if self.look(identity) is None:
            return None
        self._fd += 1
        return FakeHandle(identity, self._fd)

    def signal(self, handle: Handle, number: int) -> bool:
        assert handle.fd > 0, "a closed handle was used"
        pid = handle.identity.pid
        if pid in self.forbidden:
            from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError

            raise CleanslateError("Process %d may not be signalled by this user." % pid, pid=pid)
        if number == 0:
            return True
        self.before_signal(pid, number)
        assert self.look(handle.identity) is not None, "a signal went to a process that is gone"
        self.sent.append((round(self.clock.now() - self.began, 3), pid, int(number)))
        delay = self.deadly.get(pid, {int(TERM): 0.1, int(KILL): 0.0}).get(int(number))
        if delay is not None:
            self.ends_at[pid] = min(self.ends_at.get(pid, float("inf")), self.clock.now() + delay)
        return True

    def wait(self, handles: Sequence[Handle], seconds: float) -> list[Handle]:
        until = self.clock.now() + max(0.0, seconds)
        pids = {handle.identity.pid for handle in handles}
        due = [at for pid, at in self.ends_at.items() if pid in pids and at <= until]
        self.clock.pause((min(due) if due else until) - self.clock.now())
        for pid, at in list(self.ends_at.items()):
            if at <= self.clock.now():
                del self.ends_at[pid]
                self.tree.end(pid)
                self.on_end(pid)
        return [handle for handle in handles if self.look(handle.identity) is None]

    def signals_of(self, pid: int) -> list[int]:
        return [number for _at, target, number in self.sent if target == pid]

    @property
    def signalled(self) -> set[int]:
        return {pid for _at, pid, _number in self.sent}


class FakeStop:
    def __init__(self, systemd: FakeSystemd, key: UnitKey, seconds: float, fails: str) -> None:
        self.key = key
        self._systemd = systemd
        self._until = systemd.clock.now() + seconds
        self._fails = fails
        self.given_up = False

    @property
    def done(self) -> bool:
        return self.given_up or self._systemd.clock.now() >= self._until

    @property
    def failed(self) -> bool:
        return self.done and bool(self._fails)

    def error(self) -> str:
        return self._fails

    def give_up(self) -> None:
        self.given_up = True


class FakeSystemd(Systemd):
    """Units with their states. Stopping one takes C(seconds) and ends C(pids) of it, through the kernel."""

    def __init__(self, clock: FakeClock, kernel: FakeKernel | None = None) -> None:
        super().__init__()
        self.clock = clock
        self.kernel = kernel
        self.states: dict[UnitKey, UnitState] = {}
        self.ends: dict[UnitKey, list[int]] = {}
        self.seconds = 0.0
        self.fails = ""
        self.stopped: list[UnitKey] = []

    def unit(self, name: str, pids: Sequence[int] = (), manager: int | None = None, **state: Any) -> UnitKey:
        key = UnitKey(name, manager)
        full = {"load": "loaded", "active": "active", "cgroup": "/system.slice/" + name, **state}
        self.states[key] = UnitState(key, **full)
        self.ends[key] = list(pids)
        return key

    def show(self, keys: Any) -> dict[UnitKey, UnitState]:
        return {key: self.states[key] for key in keys if key in self.states}

    def stop(self, key: UnitKey) -> Any:
        self.stopped.append(key)
        if self.kernel is not None and not self.fails:
            for pid in self.ends[key]:
                self.kernel.ends_at[pid] = self.clock.now() + self.seconds
        return FakeStop(self, key, self.seconds, self.fails)


class FakeReader(Reader):
    def __init__(self, gone_after: int | None = None) -> None:
        super().__init__()
        self.asked = 0
        self.gone_after = gone_after

    def check(self) -> None:
        self.asked += 1
        if self.gone_after is not None and self.asked > self.gone_after:
            raise ReaderGone("gone")


class Scene:
    """A machine of fixtures, and one teardown of it."""

    def __init__(self, tree: ProcTree, **survey: Any) -> None:
        self.tree = tree
        self.survey = survey
        self.clock = FakeClock()
        self.kernel = FakeKernel(tree, self.clock)
        self.systemd = FakeSystemd(self.clock, self.kernel)
        self.reader = FakeReader()
        #: One for all looks, as in the module.
        self.surveyor: Surveyor | None = None

    def plan(
        self, scope: str = "match", ports: Sequence[Any] = (), memory: Memory | None = None, **options: Any
    ) -> Plan:
        if self.surveyor is None:
            self.surveyor = self.tree.surveyor(**self.survey)
        survey = self.surveyor.look()
        made = PlanOptions.from_params({"scope": scope, **options})
        return make_plan(survey, made, Extras(tuple(ports), self.systemd.states), memory)

    def end(self, term: float = 10.0, kill: float = 60.0, **options: Any) -> Outcome:
        return end(
            self.plan(**options),
            lambda memory: self.plan(memory=memory, **options),
            Limits(term, kill),
            self.kernel,
            self.systemd,
            self.clock,
            self.reader,
        )


def targets(plan: Plan) -> dict[int, str]:
    return {item.process.pid: item.reason for item in plan.targets}


def spared(plan: Plan) -> dict[int, str]:
    return {item.process.pid: item.reason for item in plan.spared}
