# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""The one view of a machine's GPUs and of who holds them, for every module that needs it.

Two facts decide what holding means (measured, SGLang on two H200s): a process that uses a GPU maps its node, or NVML
lists it there; a process that merely keeps another GPU's node open does neither. What cannot be told apart is a holder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pwd
import select
import typing as t

from ..common.clock import Clock
from ..common.errors import CleanslateError
from ..common.text import show
from ..proc.attribution import Attribution, attribute
from ..proc.scan import Found, Key, ScanResult, Stat, Unreadable, Watch, scan
from ..proc.table import Process, ProcFS, Vanished, ancestors
from ..state.instance import belongs
from ..state.record import InstanceRecord, RecordStore
from .devices import Devices, Gpu, combine, find_nodes
from .devices import select as select_gpus
from .masks import names_only_others
from .nvml import NvmlSession, NvmlSnapshot, NvmlSource
from .safe import check_protect, is_own_child, safe_reason

USE, UNPROVEN, NEIGHBOUR, BENIGN = "use", "unproven", "neighbour", "benign"


@dataclasses.dataclass(frozen=True)
class SurveyOptions:
    """Options of the doc fragments scan and paths."""

    users: t.Sequence[str] = ()
    dev_dir: str = "/dev"
    devices: t.Sequence[str] = ()
    containers: t.Sequence[str] = ()
    protect: t.Sequence[str] = ()
    pynvml_path: str = "/var/lib/cleanslate/lib"
    #: Seconds; None is 10 plus 3 for each GPU.
    nvml_timeout: float | None = None
    state_dir: str = "/var/lib/cleanslate"

    @classmethod
    def from_params(cls, params: t.Mapping[str, t.Any]) -> SurveyOptions:
        """From a module's parameters; others than these are left alone."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in params.items() if name in known})


@dataclasses.dataclass(frozen=True)
class Holding:
    """One process on one GPU. C(gpu) is None for one that holds control nodes alone: it holds no GPU, but it is a
    client of the driver, and counts where the whole machine is looked at."""

    process: Process
    gpu: Gpu | None
    opened: bool
    mapped: bool
    #: NVML lists its pid on this GPU.
    nvml: bool
    kind: str
    #: Why it is of that kind, for people.
    why: str

    @property
    def counts(self) -> bool:
        return self.kind in (USE, UNPROVEN)


@dataclasses.dataclass
class Survey:
    options: SurveyOptions
    devices: Devices
    scan: ScanResult
    nvml: NvmlSnapshot
    records: list[InstanceRecord]
    boot_id: str
    #: This process, its ancestors and its own children: never targets.
    own_pids: frozenset[int]
    fs: ProcFS = dataclasses.field(default_factory=ProcFS)
    holdings: list[Holding] = dataclasses.field(default_factory=list)
    _attributions: dict[int, Attribution] = dataclasses.field(default_factory=dict)
    _instances: dict[int, str | None] = dataclasses.field(default_factory=dict)

    @property
    def simulated(self) -> bool:
        return self.devices.simulated

    @property
    def table(self) -> dict[int, Process]:
        return self.scan.table

    @property
    def confined(self) -> bool:
        """Only some users' processes were looked at, on real devices: that proves nothing of the others."""
        return bool(self.options.users) and not self.simulated

    @property
    def complete(self) -> bool:
        """Whether everything that had to be seen was seen."""
        return self.simulated or (self.scan.complete and not self.confined)

    def of_gpu(self, gpu: Gpu) -> list[Holding]:
        return [holding for holding in self.holdings if holding.gpu is gpu]

    def of_process(self, pid: int) -> list[Holding]:
        return [holding for holding in self.holdings if holding.process.pid == pid]

    @property
    def control(self) -> list[Holding]:
        """Those that hold control nodes alone."""
        return [holding for holding in self.holdings if holding.gpu is None]

    @property
    def holder_pids(self) -> set[int]:
        """Pids of all that count as holders of a selected GPU."""
        return {h.process.pid for h in self.holdings if h.counts and h.gpu is not None and h.gpu.selected}

    def labels_of(self, pid: int) -> list[str]:
        """Paths of the nodes that a process holds."""
        found = self.scan.found.get(pid)
        return sorted({self.devices.labels[key] for key in found.keys if key in self.devices.labels}) if found else []

    def process(self, pid: int) -> Process | None:
        """A process of this pid, in scope or not; None when there is none."""
        if pid not in self.table:
            try:
                return self.fs.process(pid)
            except Vanished:
                return None
        return self.table[pid]

    def attribution(self, process: Process) -> Attribution:
        if process.pid not in self._attributions:
            self._attributions[process.pid] = attribute(process)
        return self._attributions[process.pid]

    def safe(self, process: Process) -> str | None:
        return safe_reason(process, self.options.protect)

    def instance_of(self, process: Process) -> str | None:
        """Name of the recorded instance that a process belongs to."""
        if process.pid not in self._instances:
            own = (record.name for record in self.records if belongs(process, record, self.boot_id))
            self._instances[process.pid] = next(own, None)
        return self._instances[process.pid]

    def record(self, name: str) -> InstanceRecord | None:
        return next((record for record in self.records if record.name == name), None)

    def in_containers(self, process: Process) -> bool:
        """Whether option C(containers) leaves this process in."""
        if not self.options.containers:
            return True
        owner = self.attribution(process)
        return any(name in _container_names(owner) for name in self.options.containers)

    def memory_of(self, pid: int) -> int | None:
        """Bytes over all GPUs as NVML says; None when it says nothing."""
        amounts = [
            process.memory
            for gpu in self.nvml.gpus
            for process in gpu.processes
            if process.pid == pid and process.memory is not None
        ]
        return sum(amounts) if amounts else None


class Surveyor:
    """Looks at the machine as often as needed; keeps NVML initialised meanwhile.

    Seams for tests: C(fs) a fixture tree, C(nvml) a stand-in, C(pids) the processes to look at, C(self_pid) who is
    looking, C(stat) how files are looked at. Raises CleanslateError on options that mean nothing here.
    """

    def __init__(
        self,
        options: SurveyOptions,
        fs: ProcFS | None = None,
        nvml: NvmlSource | None = None,
        pids: t.Iterable[int] | t.Callable[[], t.Iterable[int]] | None = None,
        self_pid: int | None = None,
        stat: Stat = os.stat,
        simulated: bool | None = None,
    ) -> None:
        self.options = options
        self.fs = fs or ProcFS()
        self._pids = pids
        self._stat = stat
        self._simulated = simulated
        self._self_pid = self_pid if self_pid is not None else (os.getpid() if self.fs.root == "/proc" else 0)
        self._ancestors: set[int] = set()
        self._uids = uids_of(options.users)
        check_protect(options.protect)
        self._snapshot: NvmlSnapshot | None = None
        self._containers_seen = False
        self._nodes = find_nodes(options.dev_dir, self.fs.root, simulated, stat)
        timeout = options.nvml_timeout
        if timeout is None:
            timeout = 10.0 + 3.0 * len(self._nodes.gpus)
        if not 0 < timeout < float("inf"):
            raise CleanslateError("nvml_timeout: %g is no time to wait; give seconds above 0." % timeout)
        self._nvml: NvmlSource = nvml if nvml is not None else NvmlSession(options.pynvml_path, timeout)

    def __enter__(self) -> Surveyor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._nvml.close()

    def look(self, nvml: bool = True) -> Survey:
        """Scan all tasks, then ask NVML: whoever ended before the scan ended before NVML was asked.

        Without C(nvml) the holders alone; which GPU is which, and who uses one, is told by NVML's last answer.
        """
        nodes = self._nodes = find_nodes(self.options.dev_dir, self.fs.root, self._simulated, self._stat)
        names = nodes.names
        watch = Watch(frozenset(nodes.labels), names, private=nodes.simulated)
        pids = self._pids() if callable(self._pids) else self._pids
        own = self._own()
        result = scan(self.fs, watch, pids, self._uids, skip=own - self._ancestors, stat=self._stat)
        if nvml or self._snapshot is None:
            self._snapshot = self._nvml.snapshot()
        devices = combine(nodes, self._snapshot, self.fs.root)
        select_gpus(devices, self.options.devices)
        store = RecordStore(self.options.state_dir)
        survey = Survey(
            self.options, devices, result, self._snapshot, store.all(), self.fs.boot_id(), frozenset(own), self.fs
        )
        self._check_containers(survey)
        survey.holdings = list(self._holdings(survey, self._snapshot))
        return survey

    def pause(self, seconds: float, pids: t.Collection[int], clock: Clock) -> None:
        """Wait between two looks, no longer than until one of these processes ends."""
        if not pids or self.fs.root != "/proc":
            clock.pause(seconds)
            return
        poller = select.poll()
        with contextlib.ExitStack() as stack:
            for pid in pids:
                try:
                    fd = os.pidfd_open(pid)
                except ProcessLookupError:
                    return
                except OSError:  # no descriptor is left: those that are watched are enough for a wake-up
                    break
                stack.callback(os.close, fd)
                poller.register(fd, select.POLLIN)
            poller.poll(seconds * 1000)

    def _own(self) -> set[int]:
        """This process, its ancestors, and the child that asks NVML. Asked anew each time: a parent may end."""
        self._ancestors = set()
        if not self._self_pid:
            return set()
        table: dict[int, Process] = {}
        pid = self._self_pid
        while pid > 0 and pid not in table:
            try:
                table[pid] = self.fs.process(pid)
            except Vanished:
                break
            pid = table[pid].ppid
        self._ancestors = set(ancestors(table, self._self_pid))
        return {self._self_pid, self._nvml.child_pid, *self._ancestors, *self._children()} - {0}

    def _children(self) -> set[int]:
        """Own children: the kernel lists them for each thread (CONFIG_PROC_CHILDREN)."""
        out: set[int] = set()
        folder = self.fs.path(self._self_pid, "task")
        for task in os.listdir(folder) if os.path.isdir(folder) else ():
            out.update(int(word) for word in (self.fs.read(self._self_pid, "task/%s/children" % task) or b"").split())
        return out

    def _check_containers(self, survey: Survey) -> None:
        # Once: a container may well end with the processes that a teardown ends.
        if self._containers_seen or not self.options.containers:
            return
        there = {survey.attribution(process) for process in survey.table.values() if not process.kernel_thread}
        names = {name for owner in there for name in _container_names(owner)}
        for name in self.options.containers:
            if name not in names:
                shown = sorted({owner.container for owner in there if owner.container})
                raise CleanslateError(
                    "containers: no process of a container %r runs here. Running containers: %s."
                    % (show(name), ", ".join(shown) or "none")
                )
        self._containers_seen = True

    def _holdings(self, survey: Survey, nvml: NvmlSnapshot) -> t.Iterator[Holding]:
        control: frozenset[Key] = frozenset(node.key for node in survey.devices.control)
        listed = {gpu.index: {process.pid for process in gpu.processes} for gpu in nvml.gpus}
        for pid in sorted(survey.scan.found):
            found = survey.scan.found[pid]
            gpus = [gpu for gpu in survey.devices.gpus if gpu.keys & found.keys]
            spared = self._benign(survey, found, listed)
            for gpu in gpus:
                kind, why = self._kind(survey, found, gpu, pid in listed.get(gpu.index, ()))
                if spared:
                    kind, why = BENIGN, spared
                yield Holding(
                    found.process,
                    gpu,
                    bool(gpu.keys & found.opened),
                    bool(gpu.keys & found.mapped),
                    pid in listed.get(gpu.index, ()),
                    kind,
                    why,
                )
            if not gpus and found.keys & control:
                kind, why = (BENIGN, spared) if spared else (UNPROVEN, "a client of the driver that holds no GPU yet")
                yield Holding(
                    found.process, None, bool(control & found.opened), bool(control & found.mapped), False, kind, why
                )

    def _benign(self, survey: Survey, found: Found, listed: t.Mapping[int, t.Collection[int]]) -> str:
        """Why a process is spared whatever it holds; empty when it is not."""
        if found.process.pid in survey.own_pids:
            return "this check runs below it"
        if is_own_child(found.process) and any(found.process.pid in pids for pids in listed.values()):
            return ""  # looks at GPUs, and never uses one
        return survey.safe(found.process) or ""

    def _kind(self, survey: Survey, found: Found, gpu: Gpu, listed: bool) -> tuple[str, str]:
        if gpu.keys & found.mapped:
            return USE, "has it mapped"
        if listed:
            return USE, "NVML lists it there"
        process = found.process
        instance = survey.instance_of(process)
        record = survey.record(instance) if instance else None
        if record is not None and record.gpus and gpu.uuid and gpu.uuid not in record.gpus:
            return NEIGHBOUR, "has its node open; belongs to instance %s on other GPUs" % record.name
        if names_only_others(process, gpu, survey.devices, self.fs, self._stat):
            return NEIGHBOUR, "has its node open; its CUDA_VISIBLE_DEVICES names only other GPUs"
        if found.thread_only:
            return UNPROVEN, "a thread of it has the node open, its main thread has exited"
        return UNPROVEN, "has its node open"


def _container_names(owner: Attribution) -> set[str]:
    """How option C(containers) may call a container: 129, lxc/129; a long id also by its first twelve digits."""
    if not owner.container_id:
        return set()
    return {owner.container_id, owner.container, owner.container.partition("/")[2]}


def take_survey(options: SurveyOptions, **seams: t.Any) -> Survey:
    """One look. Arguments as for Surveyor."""
    with Surveyor(options, **seams) as surveyor:
        return surveyor.look()


def uids_of(users: t.Sequence[str]) -> frozenset[int] | None:
    """The ids of these users (names or ids); None when there are none. Raises CleanslateError on an unknown name."""
    if not users:
        return None
    out = set()
    for user in users:
        # A container has users that this machine knows by number only; the last number is no user's.
        if user.isascii() and user.isdigit() and int(user) < 2**32 - 1:
            out.add(int(user))
            continue
        try:
            out.add(pwd.getpwnam(user).pw_uid)
        except KeyError:
            raise CleanslateError(
                "users: there is no user %r on this node. Give names or numeric ids of users that exist here."
                % show(user)
            ) from None
    return frozenset(out)


__all__ = [
    "BENIGN",
    "NEIGHBOUR",
    "UNPROVEN",
    "USE",
    "Holding",
    "Survey",
    "SurveyOptions",
    "Surveyor",
    "Unreadable",
    "take_survey",
    "uids_of",
]
