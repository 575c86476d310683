# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""For any process table: nothing outside the plan is ever signalled, and everything in it is.

The rules that every plan must obey are written here a second time, in other words, and looked up in the drawn table.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from ansible_collections.cleanslate.inference.plugins.module_utils.state.record import InstanceRecord, RecordStore

from ..proctree import ProcTree, uuid
from .fakes import Scene

GPUS = 3
PROGRAMS: dict[str, tuple[str, list[str]]] = {
    "launcher": ("python3", ["python3", "-m", "sglang.launch_server", "--port", "30000"]),
    "script": ("sglang", ["python3", "/opt/venv/bin/sglang", "serve"]),
    "scheduler": ("sglang::schedul", ["sglang::scheduler_TP1"]),
    "cut": ("sglang::detoken", []),
    "worker": ("python3", ["python3", "-c", "from multiprocessing.spawn import spawn_main"]),
    "editor": ("vim", ["vim", "sglang.launch_server.log"]),
    "shell": ("bash", ["bash", "-c", "python3 -m sglang.launch_server"]),
    "trainer": ("python3", ["python3", "/home/dcgm-exporter/train.py"]),
    "exporter": ("dcgm-exporter", ["/usr/bin/dcgm-exporter"]),
    "display": ("Xorg", ["/usr/lib/xorg/Xorg", ":0"]),
    "hostile": (") R 1 1 1 (", ["\x1b[31m\n", "sglang::scheduler", "\udcff"]),
}
MATCHING = {"launcher", "script", "scheduler", "cut"}
SAFE = {"exporter", "display"}
CGROUPS = {
    "session": "/user.slice/user-1000.slice/session-3.scope",
    "tmux": "/user.slice/user-1000.slice/user@1000.service/tmux-spawn-77.scope",
    "manager": "/user.slice/user-1000.slice/user@1000.service/app.slice/x.service",
    "root": "/",
    "service": "/system.slice/shared.service",
    "slurm": "/system.slice/slurmstepd.scope/job_7/step_0/user/task_0",
    "guest": "/lxc/129/ns/system.slice/shared.service",
}


@dataclasses.dataclass
class Drawn:
    program: str
    ppid: int
    group: int
    maps: frozenset[int]
    opens: frozenset[int]
    #: GPUs that CUDA_VISIBLE_DEVICES names; None when it is not set.
    visible: frozenset[int] | None
    cgroup: str
    instance: str | None
    state: str
    kernel: bool
    stubborn: bool


@some.composite
def tables(draw: some.DrawFn) -> dict[int, Drawn]:
    count = draw(some.integers(1, 9))
    pids = list(range(100, 100 + count))
    gpus = some.frozensets(some.integers(0, GPUS - 1), max_size=2)
    table = {}
    for place, pid in enumerate(pids):
        # A number that nobody has is a leader or parent that is gone.
        group = draw(some.sampled_from([*pids[: place + 1], 90, 91]))
        table[pid] = Drawn(
            program=draw(some.sampled_from(sorted(PROGRAMS))),
            ppid=draw(some.sampled_from([1, *pids[:place]])),
            group=group,
            maps=draw(gpus),
            opens=draw(some.one_of(gpus, some.just(frozenset(range(GPUS))))),
            visible=draw(some.one_of(some.none(), gpus)),
            cgroup=draw(some.sampled_from(sorted(CGROUPS))),
            instance=draw(some.sampled_from([None, None, None, "mine", "theirs"])),
            state=draw(some.sampled_from(["S", "S", "S", "R", "D", "T", "Z"])),
            kernel=draw(some.sampled_from([False] * 9 + [True])),
            stubborn=draw(some.sampled_from([False, False, True])),
        )
    return table


class World:
    """The drawn table as a machine, and what may be said of it."""

    def __init__(
        self, table: dict[int, Drawn], devices: frozenset[int], own: int | None, named: bool, chosen: bool, folder: Path
    ) -> None:
        self.table = table
        #: Whether option containers names the guest.
        self.chosen = chosen
        self.selected = devices or frozenset(range(GPUS))
        #: Instances that may hold a selected GPU, where every holder is asked for.
        self.holding: set[str | None] = set()
        self.named = named
        self.tree = ProcTree(folder, gpus=GPUS)
        for name, gpus in (("mine", [0]), ("theirs", [1])):
            RecordStore(str(self.tree.state)).save(
                InstanceRecord(name=name, backend="process", gpus=[uuid(number) for number in gpus])
            )
        for pid, one in table.items():
            environ = {} if one.instance is None else {"CLEANSLATE_INSTANCE": one.instance}
            if one.visible is not None:
                environ["CUDA_VISIBLE_DEVICES"] = ",".join(uuid(number) for number in sorted(one.visible))
            comm, argv = PROGRAMS[one.program]
            self.tree.add(
                pid,
                comm=comm,
                argv=argv,
                ppid=one.ppid,
                pgrp=one.group,
                state=one.state,
                flags=0x00200000 if one.kernel else 0,
                cgroup=CGROUPS[one.cgroup],
                nspid=[pid, pid - 90] if one.cgroup == "guest" else [pid],
                environ=environ,
                opens=[self.tree.gpu(number) for number in sorted(one.opens)],
                maps=[self.tree.gpu(number) for number in sorted(one.maps)],
            )
        self.own: set[int] = set()
        while own in table and own not in self.own:
            self.own.add(own)
            own = table[own].ppid
        # Parents have smaller numbers than their children.
        self.scene = Scene(
            self.tree,
            devices=[str(number) for number in sorted(devices)],
            containers=["129"] if chosen else [],
            self_pid=max(self.own, default=0),
        )
        for pid, one in table.items():
            if one.stubborn:
                self.scene.kernel.behave(pid, KILL=0.1)

    def alive(self, pid: int) -> bool:
        return not self.table[pid].kernel and self.table[pid].state != "Z"

    def surely_uses(self, pid: int) -> bool:
        """Has a selected GPU mapped."""
        return self.alive(pid) and bool(self.table[pid].maps & self.selected)

    def may_use(self, pid: int) -> bool:
        one = self.table[pid]
        return self.alive(pid) and bool((one.maps | one.opens) & self.selected)

    def uses_others_only(self, pid: int) -> bool:
        one = self.table[pid]
        return bool(one.maps) and not one.maps & self.selected and bool(one.visible) and not one.visible & self.selected

    def instance(self, pid: int) -> str | None:
        """A guest has instances of its own, which are meant when it is chosen."""
        one = self.table[pid]
        return one.instance if one.cgroup != "guest" or self.chosen else None

    def named_one(self, pid: int) -> bool:
        return self.instance(pid) == "mine" and self.named

    def forbidden(self, pid: int) -> bool:
        one = self.table[pid]
        mine = self.named_one(pid) or self.instance(pid) in self.holding
        return (
            not self.alive(pid)
            or pid in self.own
            or one.program in SAFE
            or (self.instance(pid) is not None and not mine)
            or (self.chosen and one.cgroup != "guest")
            # A job that we run in is not somebody else's.
            or (one.cgroup == "slurm" and not mine and all(self.table[us].cgroup != "slurm" for us in self.own))
        )

    def above(self, pid: int) -> set[int]:
        out: set[int] = set()
        while self.table[pid].ppid in self.table:
            pid = self.table[pid].ppid
            out.add(pid)
        return out


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    table=tables(),
    scope=some.sampled_from(["match", "all", "instances"]),
    devices=some.frozensets(some.integers(0, GPUS - 1), max_size=2),
    own=some.one_of(some.none(), some.integers(100, 108)),
    named=some.booleans(),
    chosen=some.booleans(),
)
def test_exactly_the_plan_is_signalled(
    table: dict[int, Drawn], scope: str, devices: frozenset[int], own: int | None, named: bool, chosen: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        named = named or scope == "instances"
        # Seen from outside of the guest: we are not in it, and it can only be chosen while somebody is.
        inside = {pid for pid, one in table.items() if one.cgroup == "guest" and not one.kernel}
        chosen = chosen and bool(inside)
        world = World(table, devices, own if chosen is False else None, named, chosen, Path(folder))
        if scope == "all":
            world.holding = {world.instance(pid) for pid in table if world.may_use(pid)} - {None}
        options: dict[str, Any] = {"scope": scope, "instances": ["mine"] if named else []}
        planned = world.scene.plan(**options)
        told = planned.target_pids
        spared = {item.process.pid for item in planned.spared}
        outcome = world.scene.end(term=1, kill=30, **options)
        signalled = world.scene.kernel.signalled

        assert signalled == told, "the plan and the deed differ"
        assert not told & spared
        assert outcome.reason == ""
        assert {row["pid"] for row in outcome.killed} == told
        for pid in told:
            assert not world.forbidden(pid), "never a target"
            assert (
                world.named_one(pid)
                or not world.uses_others_only(pid)
                or (world.above(pid) & told and not world.table[pid].opens & world.selected)
            ), "uses other GPUs only"
        if scope == "instances":
            for pid in told:
                assert world.instance(pid) == "mine" or world.above(pid) & told
            return
        if scope == "all":
            for pid in table:
                if world.surely_uses(pid) and not world.forbidden(pid):
                    assert pid in told, "a holder was left"
        for pid in told:
            one = table[pid]
            together = {other for other in told if table[other].group == one.group and table[other].program in MATCHING}
            leader_gone = one.group not in table or not world.alive(one.group) or one.group in told
            assert (
                world.named_one(pid)
                or world.above(pid) & told
                or (one.program in MATCHING and world.may_use(pid))
                or (scope == "all" and world.may_use(pid))
                or (one.program in MATCHING and any(pid in world.above(other) for other in told))
                or (together and leader_gone)
            ), "nothing asked for it"
        for pid in table:
            if table[pid].program in MATCHING and world.surely_uses(pid) and not world.forbidden(pid):
                assert pid in told, "a match was left"
