# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""What is to be ended and what is spared, each with its reason. Decides; touches nothing.

make_plan() is pure: the same survey, options and extras give the same plan. gather() brings in what only other parts of
the system know (who listens, what a unit's main process is); it reads.
"""

from __future__ import annotations

import dataclasses
import typing as t

from ..common.errors import CleanslateError
from ..common.text import show
from ..gpu.rows import row
from ..gpu.survey import Survey
from ..net.ports import PortState, look_at_ports
from ..proc.attribution import Attribution, attribute, is_guest_init
from ..proc.identity import Identity
from ..proc.table import Hidden, Process, ProcFS, ancestors, descendants
from ..state.instance import claimed, marked, unrecorded_members
from ..state.record import check_name
from .match import DEFAULT_MATCH, Pattern, first_match, parse_match
from .mps import Daemon, control_daemons
from .units import Systemd, UnitKey, UnitState, check_unit, may_stop

SCOPES = ("instances", "match", "all")

#: Why somebody else's container manager is left to end its own processes.
_MANAGED = {
    "slurm": "Slurm ends its own jobs: scancel %s",
    "kubernetes": "Kubernetes would start it again: delete or drain its pod (%s)",
}
_ENGINES = ("docker", "podman", "containerd")
_STOP = {"docker": "docker stop %s", "podman": "podman stop %s", "containerd": "nerdctl stop %s"}
#: What keeps a container of an engine alive (comm, cut to 15 bytes).
_RUNTIMES = ("containerd-shim", "containerd-shim-", "conmon")

#: Spared because they are somebody else's, so that their relatives are too.
_STRANGERS = ("neighbour", "other_gpus", "other_instance", "other_container", "slurm", "kubernetes", *_ENGINES)


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """What was asked for."""

    scope: str
    instances: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    match: tuple[Pattern, ...] = tuple(parse_match(DEFAULT_MATCH))
    ports: tuple[int, ...] = ()

    @classmethod
    def from_params(cls, params: t.Mapping[str, t.Any]) -> PlanOptions:
        """From the options C(scope), C(instances), C(units), C(match), C(ports). Raises CleanslateError naming the
        option and the mend."""
        scope = params.get("scope")
        if scope not in SCOPES:
            raise CleanslateError(
                "scope: say what may be ended: instances (only what is named), match (those and matching programs), "
                "or all (those and every unprotected holder).",
                option="scope",
            )
        instances = tuple(check_name(str(name), "instances") for name in params.get("instances") or ())
        units = tuple(check_unit(str(name)) for name in params.get("units") or ())
        if scope == "instances" and not instances and not units:
            raise CleanslateError(
                "scope: instances ends only what is named. Name it in instances or units, or choose another scope.",
                option="scope",
            )
        patterns = parse_match(params.get("match") or DEFAULT_MATCH)
        ports = []
        for port in params.get("ports") or ():
            if not str(port).isdigit() or not 0 < int(port) < 65536:
                raise CleanslateError("ports: %r is no TCP port (1 to 65535)." % show(str(port)), option="ports")
            ports.append(int(port))
        return cls(scope, instances, units, tuple(patterns), tuple(ports))


class Item(t.NamedTuple):
    """One decision."""

    process: Process
    reason: str
    detail: str = ""

    @property
    def identity(self) -> Identity:
        return Identity(self.process.pid, self.process.start_time)


@dataclasses.dataclass(frozen=True)
class UnitStop:
    """A unit to be stopped through its manager, and its processes in the plan."""

    key: UnitKey
    reason: str
    pids: frozenset[int] = frozenset()
    restart: str = "no"


@dataclasses.dataclass(frozen=True)
class Extras:
    """What gather() found."""

    ports: tuple[PortState, ...] = ()
    units: t.Mapping[UnitKey, UnitState] = dataclasses.field(default_factory=dict)
    #: By pid, of the processes of the same survey that were compared with the patterns: the one that it matches.
    matches: t.Mapping[int, Pattern | None] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Memory:
    """What earlier looks of the same teardown knew and later ones can no longer see: parents and leaders that died."""

    #: Every target so far, and why.
    reasons: dict[Identity, str] = dataclasses.field(default_factory=dict)
    groups: set[int] = dataclasses.field(default_factory=set)
    #: What each target's parent had started: a later child of the same parent with the same orders is its successor.
    orders: set[tuple[t.Any, ...]] = dataclasses.field(default_factory=set)
    #: Instances that were not named, and went as holders under scope all.
    instances: set[str] = dataclasses.field(default_factory=set)
    #: Start time of the youngest process at the first look: whoever is younger came since.
    youngest: int | None = None

    def add(self, plan: Plan) -> None:
        table = plan.survey.table
        if self.youngest is None:
            self.youngest = max((process.start_time for process in table.values()), default=0)
        for item in plan.targets:
            self.reasons.setdefault(item.identity, item.reason)
            order = _order(item.process, table)
            if order is not None:
                self.orders.add(order)
        self.groups.update(plan.groups)
        self.instances.update(plan.instances)

    def succeeds(self, process: Process, table: t.Mapping[int, Process]) -> bool:
        """Whether a process was started since, by the parent and with the orders of an earlier target."""
        if not self.orders or self.youngest is None or process.start_time <= self.youngest:
            return False
        return _order(process, table) in self.orders


def _order(process: Process, table: t.Mapping[int, Process]) -> tuple[t.Any, ...] | None:
    """By whom a process was started, as what, for which GPUs; None when process 1 or nobody in sight has it."""
    parent = table.get(process.ppid)
    if parent is None or parent.pid <= 1 or is_guest_init(parent, attribute(parent)) or not process.argv:
        return None
    visible = (process.environ or {}).get("CUDA_VISIBLE_DEVICES")
    return parent.pid, parent.start_time, tuple(process.argv), visible


@dataclasses.dataclass
class Plan:
    survey: Survey
    targets: list[Item] = dataclasses.field(default_factory=list)
    spared: list[Item] = dataclasses.field(default_factory=list)
    units: list[UnitStop] = dataclasses.field(default_factory=list)
    ports: list[PortState] = dataclasses.field(default_factory=list)
    warnings: list[str] = dataclasses.field(default_factory=list)
    #: Why nothing at all may be signalled.
    blocked: list[str] = dataclasses.field(default_factory=list)
    #: Control daemons of CUDA's Multi-Process Service.
    mps: list[Daemon] = dataclasses.field(default_factory=list)
    #: Process groups of unrecorded servers that are targets.
    groups: set[int] = dataclasses.field(default_factory=set)
    #: Instances that hold a selected GPU, under scope all.
    instances: set[str] = dataclasses.field(default_factory=set)
    #: What is known of the units that were looked at.
    unit_states: t.Mapping[UnitKey, UnitState] = dataclasses.field(default_factory=dict)

    @property
    def target_pids(self) -> set[int]:
        return {item.process.pid for item in self.targets}

    @property
    def empty(self) -> bool:
        return not self.targets and not self.units

    def row(self, item: Item, decision: str, **extra: t.Any) -> dict[str, t.Any]:
        """One output row, the same shape as a holder's everywhere else."""
        made = row(item.process, decision, item.reason, survey=self.survey, **extra)
        if item.detail:
            made["detail"] = show(item.detail)
        return made

    def rows(self, survey: Survey | None = None) -> tuple[list[dict[str, t.Any]], list[dict[str, t.Any]]]:
        """All targets and all spared ones as rows."""
        return [self.row(item, "target") for item in self.targets], [self.row(item, "spared") for item in self.spared]


class _Planner:
    def __init__(self, survey: Survey, options: PlanOptions, extras: Extras, memory: Memory | None) -> None:
        self.survey = survey
        self.options = options
        self.extras = extras
        self.memory = memory or Memory()
        self.table = {
            pid: process
            for pid, process in survey.table.items()
            if pid > 1 and not process.zombie and not process.kernel_thread
        }
        self.own = set(survey.own_pids)
        self._instances: dict[int, str | None] = {}
        self.matches: dict[int, Pattern | None] = dict(extras.matches)
        self.own_containers = {self.attribution(survey.table[pid]).container for pid in self.own if pid in survey.table}
        self.targets: dict[int, Item] = {}
        self.spared: dict[int, Item] = {}
        self.waiting: dict[int, str] = {}
        self.groups: set[int] = set()
        self.unit_targets: dict[UnitKey, str] = {}
        self.warnings: list[str] = []
        self.blocked: list[str] = []
        # What each process holds: of the selected GPUs, and of any.
        self.uses: set[int] = set()
        self.uses_other: set[int] = set()
        self.neighbours: set[int] = set()
        self.labels: dict[int, list[str]] = {}
        for holding in survey.holdings:
            pid = holding.process.pid
            if holding.counts:
                # Control nodes belong to no GPU: their clients count where the whole machine is meant.
                mine = holding.gpu.selected if holding.gpu is not None else not survey.options.devices
                self.labels.setdefault(pid, []).append(holding.gpu.label if holding.gpu is not None else "the driver")
                if holding.gpu is not None or mine:
                    (self.uses if mine else self.uses_other).add(pid)
            elif holding.kind == "neighbour" and holding.gpu is not None and holding.gpu.selected:
                self.neighbours.add(pid)
        #: Under scope all every holder is asked for, also those of instances that were not named.
        self.holding_instances = set(self.memory.instances)
        if options.scope == "all":
            found = (self.instance(self.table[pid]) for pid in self.uses if pid in self.table)
            self.holding_instances.update(name for name in found if name is not None)

    # -- who a process is ---------------------------------------------------------------------------------------

    def attribution(self, process: Process) -> Attribution:
        return self.survey.attribution(process)

    def instance(self, process: Process) -> str | None:
        """The instance that a process belongs to; a named one also by its mark alone, when its record is lost.

        Records of a guest are the guest's own files and are not read from outside: there the mark is what counts.
        """
        if process.pid not in self._instances:
            name = self.survey.instance_of(process)
            if name is None and self.in_chosen_guest(process):
                name = claimed(process) or None
            elif name is None and self.options.instances:
                mark = marked(process)
                name = mark if mark in self.options.instances else None
            self._instances[process.pid] = name
        return self._instances[process.pid]

    def in_chosen_guest(self, process: Process) -> bool:
        """Whether a process is in one of the containers that were chosen from outside of them."""
        if not self.survey.options.containers or not self.survey.in_containers(process):
            return False
        return self.attribution(process).container not in self.own_containers

    def match(self, process: Process) -> Pattern | None:
        """The pattern that a process matches."""
        if process.pid not in self.matches:
            self.matches[process.pid] = first_match(self.options.match, process)
        return self.matches[process.pid]

    def is_named(self, process: Process) -> bool:
        """Whether a process belongs to an instance that was named."""
        name = self.instance(process)
        return name is not None and name in self.options.instances

    def unit_key(self, process: Process) -> UnitKey | None:
        """The unit of a process, if a manager of this machine, of a user or of an LXC guest runs it."""
        found = self.attribution(process)
        guest = ""
        if found.container and found.container not in self.own_containers:
            if found.container_kind != "lxc":
                return None
            guest = found.container_id
        if found.user_unit and found.manager_uid is not None:
            return UnitKey(found.user_unit, found.manager_uid, guest)
        return UnitKey(found.unit, None, guest) if found.unit else None

    def guest_of(self, process: Process) -> str | None:
        """The chosen LXC container of a process: empty for where we run, None for any other container."""
        found = self.attribution(process)
        if not found.container or found.container in self.own_containers:
            return ""
        return found.container_id if found.container_kind == "lxc" and self.survey.in_containers(process) else None

    def main_of(self, state: UnitState) -> int:
        """The pid of a unit's main process as it is called here: a guest's manager counts as the guest does."""
        if not state.key.container or not state.main_pid:
            return state.main_pid
        for process in self.in_cgroup(state):
            if self.attribution(process).guest_pid == state.main_pid:
                return process.pid
        return 0

    def never(self, process: Process) -> Item | None:
        """Why a process is never a target, whatever the scope; None when it may be one."""
        pid = process.pid
        if pid in self.own:
            return Item(process, "own", "this module, or what it was started from")
        why = self.survey.safe(process)
        if why is not None:
            return Item(process, "protected", why)
        if not self.survey.in_containers(process):
            return Item(process, "other_container", "outside of the chosen containers")
        found = self.attribution(process)
        if is_guest_init(process, found) and found.container not in self.own_containers:
            stop = "%s %s" % ("pct stop" if found.container_id.isdigit() else "lxc-stop -n", found.container_id)
            return Item(process, "init", "process 1 of %s is never signalled: %s" % (found.container, stop))
        name = self.instance(process)
        if name is not None and name not in self.options.instances and name not in self.holding_instances:
            return Item(process, "other_instance", "belongs to instance %s, which is not named" % name)
        if name is not None:
            return None
        if found.container_kind in _MANAGED and found.container not in self.own_containers:
            return Item(process, found.container_kind, _MANAGED[found.container_kind] % found.container_id)
        return None

    def engine(self, process: Process) -> Attribution | None:
        """The attribution of a process in somebody's Docker or podman container."""
        found = self.attribution(process)
        foreign = found.container_kind in _ENGINES and found.container not in self.own_containers
        return found if foreign else None

    def runtime_lives(self, process: Process) -> bool:
        """Whether the runtime of its container still stands above a process. When that cannot be seen it counts as
        alive: then the engine has to end it."""
        chain = ancestors(self.survey.table, process.pid)
        if any(pid > 1 and self.survey.table[pid].comm in _RUNTIMES for pid in chain if pid in self.survey.table):
            return True
        return not chain or chain[-1] not in (0, 1)

    # -- decisions ----------------------------------------------------------------------------------------------

    def spare(self, item: Item) -> None:
        if item.process.pid not in self.targets:
            self.spared.setdefault(item.process.pid, item)

    def take(self, process: Process, reason: str, detail: str = "") -> bool:
        """Make a process a target unless it never is; returns whether it is one now."""
        if process.pid in self.targets:
            return True
        forbidden = self.never(process)
        if forbidden is not None:
            self.spare(forbidden)
            return False
        engine = None if self.is_named(process) or reason == "unit" else self.engine(process)
        if engine is not None:
            stop = _STOP[engine.container_kind] % engine.container_id
            if self.options.scope != "all":
                self.spare(Item(process, engine.container_kind, "its engine ends it: " + stop))
                return False
            if self.runtime_lives(process):
                self.blocked.append(
                    "Process %d (%s) belongs to the live container %s: end it with `%s` first."
                    % (process.pid, show(process.comm), engine.container, stop)
                )
                self.spare(Item(process, engine.container_kind, "its runtime lives: " + stop))
                return False
        self.spared.pop(process.pid, None)
        self.waiting.pop(process.pid, None)
        self.targets[process.pid] = Item(process, reason, detail)
        return True

    def outside(self, members: t.Collection[Process], what: str) -> bool:
        """Whether a whole server holds GPUs, and none of the selected ones; it is spared then."""
        pids = {process.pid for process in members}
        if pids & self.uses or not pids & self.uses_other:
            return False
        labels = sorted({label for pid in pids for label in self.labels.get(pid, ())})
        for process in members:
            self.spare(Item(process, "other_gpus", "%s uses only %s" % (what, ", ".join(labels))))
        return True

    def named(self) -> None:
        """The named instances and units."""
        for name in self.options.instances:
            members = [process for process in self.table.values() if self.instance(process) == name]
            record = next((record for record in self.survey.records if record.name == name), None)
            key = UnitKey(record.unit) if record is not None and record.unit else None
            state = self.extras.units.get(key) if key is not None else None
            if record is None and not members and self.survey.records:
                known = ", ".join(sorted(record.name for record in self.survey.records))
                self.warnings.append("Instance %s is not known on this node (known: %s)." % (name, known))
            if members and self.outside(members, "instance " + name):
                continue
            for process in members:
                self.take(process, "instance", "instance " + name)
            if key is not None and state is not None and state.live:
                self.unit_targets.setdefault(key, "instance " + name)
        for key in self.unit_keys():
            unit = str(key)
            state = self.extras.units.get(key)
            if state is None or not state.known:
                self.warnings.append("Unit %s is not known on this node." % unit)
                continue
            members = self.in_cgroup(state)
            if members and self.outside(members, "unit " + unit):
                continue
            for process in members:
                self.take(process, "unit", "unit " + unit)
            if state.live:
                self.unit_targets.setdefault(key, "named")

    def unit_keys(self) -> list[UnitKey]:
        """The named units: of this machine, or of each of the chosen guests."""
        guests = self.survey.options.containers or [""]
        return [UnitKey(unit, None, guest) for guest in guests for unit in self.options.units]

    def in_cgroup(self, state: UnitState) -> list[Process]:
        """The processes of a unit. Never the root of a hierarchy."""
        path = state.cgroup.rstrip("/")
        if not path:
            return []
        if state.key.container:
            return [process for process in self.table.values() if self.unit_key(process) == state.key]
        return [p for p in self.table.values() if p.cgroup == path or p.cgroup.startswith(path + "/")]

    def spare_by_gpu(self, process: Process) -> Item | None:
        """Why what a process holds keeps it out, under the selected GPUs; None when it does not."""
        pid = process.pid
        if pid in self.uses:
            return None
        if pid in self.uses_other:
            if pid in self.neighbours:
                detail = "has the node open only; it uses " + ", ".join(sorted(set(self.labels[pid])))
                return Item(process, "neighbour", detail)
            return Item(process, "other_gpus", "uses only " + ", ".join(sorted(set(self.labels[pid]))))
        if pid in self.neighbours:
            return Item(process, "neighbour", "has the node open only, and its environment names other GPUs")
        return None

    def matched(self) -> None:
        for process in self.table.values():
            pattern = self.match(process)
            if pattern is None:
                continue
            out = self.never(process) or self.spare_by_gpu(process)
            if out is not None:
                self.spare(out)
            elif process.pid in self.uses:
                self.take(process, "match", str(pattern))
            elif process.pid not in self.targets:
                self.waiting[process.pid] = str(pattern)

    def holders(self) -> None:
        """Every holder of a selected GPU: a target under all, else spared by name."""
        for pid in sorted(self.uses):
            if pid == 1:
                self.spare(
                    Item(self.survey.table[1], "init", "process 1 is never signalled: stop the machine or container")
                )
            process = self.table.get(pid)
            if process is None or pid in self.targets:
                continue
            if self.options.scope == "all":
                self.take(process, "holder", "uses " + ", ".join(sorted(set(self.labels[pid]))))
            else:
                self.spare(self.never(process) or Item(process, "foreign_holder", "nothing asked for it"))
        for holding in self.survey.holdings:
            process = self.table.get(holding.process.pid)
            if process is None or process.pid in self.targets or process.pid in self.spared:
                continue
            if holding.kind == "benign":
                self.spare(self.never(process) or Item(process, "protected", holding.why))
            elif holding.counts or (holding.gpu is not None and holding.gpu.selected):
                out = self.never(process) or self.spare_by_gpu(process)
                if out is not None and process.pid not in self.waiting:
                    self.spare(out)

    def listeners(self) -> None:
        """Who listens on the server's ports."""
        for state in self.extras.ports:
            for listener in state.listeners:
                if not listener.pids:
                    self.warnings.append(
                        "Port %d is listened on (%s) by a process that is out of sight."
                        % (state.port, listener.address)
                    )
                for pid in listener.pids:
                    process = self.table.get(pid)
                    if process is None or pid in self.targets:
                        continue
                    asked = self.options.scope == "all" or pid in self.waiting
                    detail = "listens on %s port %d" % (listener.address, state.port)
                    if asked and self.never(process) is None:
                        self.take(process, "listener", detail)
                        continue
                    before = self.spared.pop(pid, None) or self.never(process)
                    if before is not None and before.reason != "foreign_holder":
                        detail += "; %s: %s" % (before.reason, before.detail)
                    self.spare(Item(process, "port_busy", detail))

    # -- what goes with the targets -----------------------------------------------------------------------------

    def kept_apart(self) -> set[int]:
        """Spared for what they hold or whose they are, with their relatives: not part of a target's server."""
        apart = {pid for pid, item in self.spared.items() if item.reason in _STRANGERS}
        apart |= (self.uses_other | self.neighbours) - self.uses - set(self.targets)
        related = descendants(self.table, apart)
        for pid in apart:
            related.update(ancestors(self.table, pid))
        return apart | (related - set(self.targets))

    def widen(self) -> None:
        """Descendants, matched ancestors, the process groups of unrecorded servers, services: until nothing changes."""
        while True:
            before = len(self.targets)
            self._relatives()
            self._groups()
            self._services()
            if len(self.targets) == before:
                return

    def _relatives(self) -> None:
        for pid in sorted(descendants(self.table, self.targets)):
            process = self.table[pid]
            # A neighbour is never a target, whoever started it.
            if pid in self.neighbours and pid not in self.uses and not self.is_named(process):
                self.spare(self.spare_by_gpu(process) or Item(process, "neighbour"))
                continue
            self.take(process, "descendant", "started by a target")
        for pid in list(self.targets):
            for above in ancestors(self.table, pid):
                if above in self.waiting:
                    self.take(self.table[above], "ancestor", self.waiting[above])

    def _groups(self) -> None:
        if self.options.scope == "instances":
            return
        seeds = {
            pid
            for pid, item in self.targets.items()
            if item.reason in ("match", "listener", "ancestor")
            and self.instance(item.process) is None
            and (item.reason != "listener" or self.match(item.process) is not None)
        }
        found = {process.pgrp for process in unrecorded_members(self.table.values(), seeds)}
        found.update(group for group in self.memory.groups if self._still_ours(group))
        apart = self.kept_apart()
        for group in sorted(found):
            members = [process for process in self.table.values() if process.pgrp == group]
            if any(process.pid in self.own for process in members):
                continue
            self.groups.add(group)
            for process in members:
                if process.pid not in apart:
                    self.take(process, "group", "process group %d of a target" % group)

    def _still_ours(self, group: int) -> bool:
        """Whether a process group of an earlier look is still led by nobody, or by the one that led it then."""
        member = next((process for process in self.table.values() if process.pgrp == group), None)
        if member is None:
            return False
        try:
            leader = member.group_leader()
        except Hidden:
            return False
        return leader is None or leader.zombie or Identity(leader.pid, leader.start_time) in self.memory.reasons

    def _services(self) -> None:
        for pid in list(self.targets):
            process = self.targets[pid].process
            key = self.unit_key(process)
            if key is None or not may_stop(key.name):
                continue
            state = self.extras.units.get(key)
            if state is None or self.main_of(state) != pid:
                continue
            members = self.in_cgroup(state)
            if any(member.pid in self.own for member in members):
                self.warnings.append("%s is not stopped: this module runs in it." % str(key))
                continue
            self.unit_targets.setdefault(key, "its main process %d is a target" % pid)
            for member in members:
                self.take(member, "cgroup", "in " + str(key))

    # -- the end ------------------------------------------------------------------------------------------------

    def persistence(self) -> None:
        """Clocks and power caps fall back when the last client of a GPU without persistence mode goes."""
        modes = {gpu.uuid: gpu.persistence for gpu in self.survey.nvml.gpus}
        for gpu in self.survey.devices.gpus:
            if modes.get(gpu.uuid) is not False:
                continue
            clients = {holding.process.pid for holding in self.survey.of_gpu(gpu)}
            if clients and clients <= set(self.targets):
                self.warnings.append(
                    "%s: its last client goes and persistence mode is off, so the driver resets its clocks, power cap "
                    "and compute mode, and the next start takes longer." % gpu.label
                )

    def check_init(self) -> None:
        """A pattern that names process 1 was not meant."""
        init = self.survey.table.get(1)
        if init is None or init.kernel_thread:
            return
        pattern = self.match(init)
        if pattern is not None and self.options.scope != "instances":
            raise CleanslateError(
                "match: %s names process 1 (%s), which is never signalled. Stop the container or machine that it is, "
                "or take the pattern away." % (pattern, show(init.title)),
                option="match",
            )

    def remembered(self) -> None:
        """What was a target once is one until it has ended, although its relatives or its GPU may be gone."""
        for process in self.table.values():
            reason = self.memory.reasons.get(Identity(process.pid, process.start_time))
            if reason is not None:
                self.take(process, reason)
            elif self.memory.succeeds(process, self.survey.table) and self.spare_by_gpu(process) is None:
                self.take(process, "respawned", "process %d started it again" % process.ppid)

    def plan(self) -> Plan:
        self.check_init()
        self.remembered()
        self.named()
        if self.options.scope != "instances":
            self.matched()
        self.holders()
        self.listeners()
        self.widen()
        for pid, why in self.waiting.items():
            self.spare(Item(self.table[pid], "not_holding", "%s, but holds none of these GPUs" % why))
        # Who was spared as a bystander and then turned out to be part of a target's server is a target.
        spared = [item for pid, item in sorted(self.spared.items()) if pid not in self.targets]
        self.persistence()
        if self.survey.scan.unreadable:
            first = self.survey.scan.unreadable[0]
            self.warnings.append(
                "%d processes could not be looked at, first %d (%s): who of them holds a GPU is not known here."
                % (len(self.survey.scan.unreadable), first.pid, show(first.comm))
            )
        units = []
        for key, why in self.unit_targets.items():
            state = self.extras.units[key]
            pids = frozenset(p.pid for p in self.in_cgroup(state)) & frozenset(self.targets)
            units.append(UnitStop(key, why, pids, state.restart))
        return Plan(
            survey=self.survey,
            targets=[item for _pid, item in sorted(self.targets.items())],
            spared=spared,
            units=units,
            ports=list(self.extras.ports),
            warnings=list(dict.fromkeys(self.warnings)),
            blocked=list(dict.fromkeys(self.blocked)),
            mps=control_daemons(self.table.values(), self.guest_of) if self.targets else [],
            groups=self.groups,
            instances=self.holding_instances,
            unit_states=self.extras.units,
        )


def make_plan(survey: Survey, options: PlanOptions, extras: Extras | None = None, memory: Memory | None = None) -> Plan:
    """Decide for every process in sight. Pure.

    C(memory) is what earlier looks of the same teardown knew. Raises CleanslateError when the options cannot be meant
    (a pattern that names process 1).
    """
    return _Planner(survey, options, extras or Extras(), memory).plan()


def gather(survey: Survey, options: PlanOptions, systemd: Systemd | None = None, fs: ProcFS | None = None) -> Extras:
    """Look up what make_plan() needs beside the survey: who listens on the ports, and what systemd knows of the units
    that are named or that hold a possible target. Reads only; at most one question to each manager."""
    systemd = systemd or Systemd()
    planner = _Planner(survey, options, Extras(), None)
    guests = [
        pid for pid, process in survey.table.items() if survey.options.containers and survey.in_containers(process)
    ]
    ports = look_at_ports(fs or ProcFS(), options.ports, survey.table, guests)
    keys = [UnitKey(record.unit) for record in survey.records if record.name in options.instances and record.unit]
    keys += planner.unit_keys()
    listening = {pid for state in ports for listener in state.listeners for pid in listener.pids}
    for process in planner.table.values():
        pid = process.pid
        wanted = pid in planner.uses or pid in listening
        if wanted or (options.scope != "instances" and planner.match(process) is not None):
            # Managers of guests that were not chosen, and of who is spared anyway, are not asked.
            key = planner.unit_key(process) if planner.never(process) is None else None
            if key is not None and may_stop(key.name):
                keys.append(key)
    return Extras(tuple(ports), systemd.show(keys) if keys else {}, planner.matches)
