# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Whether GPUs are free: pure judgement of one survey. free, busy or unknown; a blind instrument is never a pass.

Facts used (one and two H200s, driver 580): two idle SGLang processes show 3 MiB, so memory alone says nothing; the
memory of a killed process comes back up to 0.4 s after its last descriptor is gone, so holders alone say nothing
either; a GPU keeps 771 MiB of the context of its dead rank's live peer; NVML can name a dead process as the owner while
a forked child holds the memory; drivers and bindings that do not fit give pids 0 and 4294967295.
"""

from __future__ import annotations

import dataclasses
import typing as t

from ..common.text import format_size, show
from .devices import Gpu
from .nvml import NvmlGpu, NvmlProcess
from .rows import describe, holder_rows
from .survey import BENIGN, NEIGHBOUR, Holding, Survey

FREE, BUSY, UNKNOWN = "free", "busy", "unknown"

#: Actions of the driver after which alone the GPU can be used again.
_RESETS = ("reset", "reboot")
#: Context memory that NVML attributes to nobody, at most, for each process that ends (measured: 771 MiB).
_CONTEXT = 1024**3
_COMPUTE_PROHIBITED = 2


@dataclasses.dataclass(frozen=True)
class Limits:
    #: How many GPUs the machine must have; None: as many as it has nodes, and at least one.
    expected_count: int | None = None
    #: Bytes.
    memory_threshold: int = 128 * 1024**2
    #: Bytes that an idle GPU shows where the driver knows memory of version 1 only.
    memory_baseline: int | None = None


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why something is not free."""

    code: str
    message: str
    advice: str = ""
    gpu: int | None = None
    pid: int | None = None
    #: busy or unknown: what it makes of a GPU.
    verdict: str = BUSY
    #: Waiting cannot change it.
    permanent: bool = False

    def data(self) -> dict[str, t.Any]:
        return {"code": self.code, "msg": self.message, "advice": self.advice, "gpu": self.gpu, "pid": self.pid}


@dataclasses.dataclass(frozen=True)
class Note:
    code: str
    message: str
    gpu: int | None = None

    def data(self) -> dict[str, t.Any]:
        return {"code": self.code, "msg": self.message, "gpu": self.gpu}


@dataclasses.dataclass
class GpuVerdict:
    gpu: Gpu
    reasons: list[Reason]
    notes: list[Note]
    #: Why the machine as a whole could not be seen: then no GPU of it is free.
    blind: list[Reason] = dataclasses.field(default_factory=list)

    @property
    def verdict(self) -> str:
        return _worst([*self.reasons, *self.blind], FREE)


@dataclasses.dataclass
class Verdict:
    survey: Survey
    gpus: list[GpuVerdict]
    #: Of the machine, not of one GPU.
    machine: list[Reason]
    machine_notes: list[Note]

    @property
    def reasons(self) -> list[Reason]:
        return [*self.machine, *(reason for gpu in self.gpus for reason in gpu.reasons)]

    @property
    def notes(self) -> list[Note]:
        return [*self.machine_notes, *(note for gpu in self.gpus for note in gpu.notes)]

    @property
    def verdict(self) -> str:
        return _worst(self.reasons, FREE)

    @property
    def permanent(self) -> bool:
        return any(reason.permanent for reason in self.reasons)

    @property
    def message(self) -> str:
        return _message(self)

    def data(self) -> dict[str, t.Any]:
        """What gpu_free returns of it."""
        return {
            "free": self.verdict == FREE,
            "verdict": self.verdict,
            "reasons": _codes(self.reasons),
            "notes": _codes(self.notes),
            "details": [reason.data() for reason in self.reasons] + [note.data() for note in self.notes],
            "gpus": [_gpu_data(self.survey, gpu) for gpu in self.gpus],
            "holders": holder_rows(self.survey),
            "benign_holders": holder_rows(self.survey, (BENIGN,)),
            "neighbours": holder_rows(self.survey, (NEIGHBOUR,)),
            "nvml_processes": nvml_rows(self.survey),
            "scan": scan_data(self.survey),
            "simulated": self.survey.simulated,
            "msg": self.message,
        }


def _worst(reasons: t.Iterable[Reason], best: str) -> str:
    verdicts = {reason.verdict for reason in reasons} | {best}
    return next(verdict for verdict in (BUSY, UNKNOWN, FREE) if verdict in verdicts)


def _codes(items: t.Iterable[Reason | Note]) -> list[str]:
    return list(dict.fromkeys(item.code for item in items))


def judge(survey: Survey, limits: Limits) -> Verdict:
    """The verdict on the selected GPUs."""
    machine, notes = _machine(survey, limits)
    # Nothing to look at, and the caller knows it: no driver is no blindness then.
    fault = survey.nvml.fault
    if limits.expected_count == 0 and not survey.devices.gpus and fault is not None and fault.code in (9, 12):
        machine = [reason for reason in machine if reason.code != fault.reason]
    counted = not any(reason.code == "count_mismatch" for reason in machine)
    # A GPU too few says nothing of those that are there, and a holder of no GPU holds none of them.
    blind = [reason for reason in machine if reason.verdict == UNKNOWN and reason.code != "count_mismatch"]
    gpus = []
    for gpu in survey.devices.selected:
        if gpu.hidden:
            notes.append(
                Note("gpu_not_permitted", "%s is visible, but not given to this machine" % gpu.label, gpu.index)
            )
            continue
        reasons, gpu_notes = _Judge(survey, limits, gpu, counted).all()
        gpus.append(GpuVerdict(gpu, reasons, gpu_notes, blind))
    return Verdict(survey, gpus, machine, notes)


def _machine(survey: Survey, limits: Limits) -> tuple[list[Reason], list[Note]]:
    reasons: list[Reason] = []
    notes: list[Note] = []
    devices = survey.devices
    minors = {gpu.minor for gpu in devices.gpus if gpu.minor is not None}
    for stale in devices.stale:
        if stale.minor is None or stale.minor not in minors:
            reasons.append(_stale(stale.path, stale.why, None))
    if survey.nvml.fault is not None:
        fault = survey.nvml.fault
        reasons.append(Reason(fault.reason, fault.message, fault.advice, verdict=UNKNOWN, permanent=True))
    for unreadable in survey.scan.unreadable:
        name = "PID %d (%s)" % (unreadable.pid, show(unreadable.comm)) if unreadable.comm else "PID %d" % unreadable.pid
        text = "%s could not be looked at: %s" % (name, unreadable.why)
        if survey.simulated:
            notes.append(Note("scan_incomplete", text))
        else:
            reasons.append(
                Reason(
                    "scan_incomplete",
                    text,
                    "Run the play with become: true, with the right to trace other processes (CAP_SYS_PTRACE).",
                    pid=unreadable.pid,
                    verdict=UNKNOWN,
                )
            )
    if survey.confined:
        reasons.append(
            Reason(
                "scan_incomplete",
                "only processes of %s were looked at" % ", ".join(show(user) for user in survey.options.users),
                "Leave users empty: what other users hold is not free.",
                verdict=UNKNOWN,
                permanent=True,
            )
        )
    reasons += _count(survey, limits)
    if not survey.options.devices:
        for holding in survey.control:
            if holding.counts:
                reasons.append(_holder(survey, holding, None))
    else:
        pids = sorted({holding.process.pid for holding in survey.control if holding.counts})
        if pids:
            notes.append(Note("open_only", "PID %s: clients of the driver that hold no GPU" % _list(pids)))
    return reasons, notes


def _count(survey: Survey, limits: Limits) -> list[Reason]:
    devices = survey.devices
    if not survey.nvml.ok and devices.node_count:
        return []  # who cannot see does not count
    found = len([gpu for gpu in devices.gpus if not gpu.hidden and (gpu.nvml is not None or not survey.nvml.ok)])
    expected = limits.expected_count
    if expected is None:
        expected = devices.node_count
        if not expected and not found:
            return [
                Reason(
                    "count_mismatch",
                    "there is no GPU here: %s has no nvidiaN and NVML lists none" % show(devices.dev_dir),
                    "If this machine has none, say so: expected_count: 0.",
                    verdict=UNKNOWN,
                    permanent=True,
                )
            ]
    if found == expected:
        return []
    missing = [gpu.label for gpu in devices.gpus if gpu.nvml is None and survey.nvml.ok]
    return [
        Reason(
            "count_mismatch",
            "%d of %d GPUs are there" % (found, expected) + (" (missing: %s)" % ", ".join(missing) if missing else ""),
            "A GPU may have fallen off the bus: look at dmesg and nvidia-smi."
            if found < expected
            else "Correct expected_count, or look whose the others are.",
            verdict=UNKNOWN,
            permanent=True,
        )
    ]


class _Judge:
    """One GPU."""

    def __init__(self, survey: Survey, limits: Limits, gpu: Gpu, counted: bool) -> None:
        self.survey = survey
        self.limits = limits
        self.gpu = gpu
        #: Whether as many GPUs are there as there should be.
        self.counted = counted
        self.holdings = survey.of_gpu(gpu)
        self.reasons: list[Reason] = []
        self.notes: list[Note] = []

    def all(self) -> tuple[list[Reason], list[Note]]:
        survey, gpu = self.survey, self.gpu
        for stale in survey.devices.stale:
            if stale.minor is not None and stale.minor == gpu.minor:
                self.reasons.append(_stale(stale.path, stale.why, gpu.index))
        holders = [holding for holding in self.holdings if holding.counts]
        self.reasons += [_holder(survey, holding, gpu) for holding in holders]
        neighbours = [holding for holding in self.holdings if holding.kind == NEIGHBOUR]
        if neighbours:
            names = ", ".join(describe(holding.process) for holding in neighbours[:3])
            more = len(neighbours) - 3
            self.note("open_only", "%s%s: open, not used" % (names, " and %d more" % more if more > 0 else ""))
        if gpu.nvml is not None:
            self.driver(gpu.nvml)
            self.processes(gpu.nvml, holders)
            if gpu.nvml.error is None:
                self.memory(gpu.nvml, holders, neighbours)
            self.information(gpu.nvml)
        elif survey.nvml.ok:
            text = "%s is there, and NVML lists no GPU for it" % (gpu.node.path if gpu.node else gpu.label)
            if self.counted:
                self.note("node_without_gpu", text)
            else:
                advice = "It may have fallen off the bus: look at dmesg and nvidia-smi."
                self.reason("count_mismatch", text, advice, verdict=UNKNOWN, permanent=True)
        return self.reasons, self.notes

    def reason(self, code: str, message: str, advice: str = "", **more: t.Any) -> None:
        self.reasons.append(Reason(code, message, advice, gpu=self.gpu.index, **more))

    def note(self, code: str, message: str) -> None:
        self.notes.append(Note(code, message, self.gpu.index))

    def driver(self, nvml: NvmlGpu) -> None:
        if nvml.error is not None:
            error = nvml.error
            self.reason(error.reason, error.message, error.advice, verdict=UNKNOWN, permanent=True)
        action = nvml.recovery_action
        if any(word in action for word in _RESETS):
            self.reason(
                "reset_required",
                "the driver asks to %s" % action,
                "Do that: nothing that is started on it will work.",
                verdict=UNKNOWN,
                permanent=True,
            )
        elif action not in ("", "none"):
            self.note("recovery_action", "the driver asks to %s" % action)

    def processes(self, nvml: NvmlGpu, holders: list[Holding]) -> None:
        """NVML's list: evidence of use, beside the scan."""
        on_it = {holding.process.pid for holding in self.holdings}
        unlisted = [holding for holding in holders if not holding.nvml]
        for process in nvml.processes:
            if process.pid in on_it:
                continue
            if invalid(self.survey, process.pid):
                self.reason(
                    "invalid_pid",
                    "NVML lists a process with the impossible PID %d" % process.pid,
                    "Driver and nvidia-ml-py do not fit together: update the binding.",
                )
                continue
            if process.pid in self.survey.own_pids:
                self.reason("holder", "NVML lists PID %d, which is this check's own" % process.pid, pid=process.pid)
                continue
            local = self.survey.process(process.pid)
            if local is None:
                # A process that ended after forking a child which holds on: the child counts (Megatron-LM#3684).
                if not unlisted:
                    self.reason(
                        "owner_other_namespace",
                        "NVML lists PID %d%s, not in /proc here: it has ended, or lives in another PID namespace"
                        % (process.pid, _memory_text(process)),
                        "Look on the host, or in the other containers that were given this GPU.",
                        pid=process.pid,
                    )
            elif local.zombie:
                self.reason(
                    "memory_no_owner", "NVML still lists %s, which has ended" % describe(local), pid=process.pid
                )
            elif local.exiting and process.pid in self.survey.table:
                self.reason(
                    "holder",
                    "NVML lists %s%s, which is ending: the driver has not taken everything back yet"
                    % (describe(local), _memory_text(process)),
                    "If it stays, look at its state, at /proc/%d/stack and at dmesg." % process.pid,
                    pid=process.pid,
                )
            elif process.pid not in self.survey.table:
                self.reason(
                    "foreign_holder",
                    "NVML lists %s%s, which is not among the users looked at"
                    % (describe(local), _memory_text(process)),
                    "Look at all users' processes, or let its owner end it.",
                    pid=process.pid,
                )
            elif process.pid in [unreadable.pid for unreadable in self.survey.scan.unreadable]:
                self.reason(
                    "holder",
                    "NVML lists %s%s, which could not be looked at" % (describe(local), _memory_text(process)),
                    pid=process.pid,
                )
            else:
                self.reason(
                    "owner_other_namespace",
                    "NVML lists PID %d%s; here that is %s, which holds no GPU: the pid is of another PID namespace"
                    % (process.pid, _memory_text(process), describe(local)),
                    "Look on the host, or in the other containers that were given this GPU.",
                    pid=process.pid,
                )

    def memory(self, nvml: NvmlGpu, holders: list[Holding], neighbours: list[Holding]) -> None:
        used = nvml.memory_used
        if used is None:
            self.note("memory_unmeasurable", "the driver gives no memory numbers: judged by holders alone")
            return
        threshold = self.limits.memory_threshold
        if nvml.memory_version == 1:
            if used > threshold and self.limits.memory_baseline is None and not holders:
                self.reason(
                    "memory_no_owner",
                    "%s are in use, and this driver cannot say how much of it is its own reserve" % format_size(used),
                    "Give memory_baseline: what an idle GPU of this kind shows.",
                    verdict=UNKNOWN,
                    permanent=True,
                )
                return
            used = max(0, used - (self.limits.memory_baseline or 0))
        if used <= threshold or holders:
            return
        if nvml.numa_node is not None:
            # Coherent memory is the system's too: its page cache lies there (GH200, GB200).
            self.note(
                "memory_unmeasurable", "%s are in use, page cache included: judged by holders" % format_size(used)
            )
            return
        named = ("holder", "foreign_holder", "owner_other_namespace", "invalid_pid")
        if any(reason.code in named for reason in self.reasons):
            return  # its owner has been named, as far as it can be
        benign = [holding for holding in self.holdings if holding.kind == BENIGN]
        listed = {process.pid: process.memory for process in nvml.processes}
        owners = [holding for holding in benign if holding.process.pid in listed]
        amounts = [listed[holding.process.pid] for holding in owners]
        if owners and (None in amounts or used - sum(amount or 0 for amount in amounts) <= threshold):
            self.reason(
                "memory_benign_holder",
                "%s are in use by %s, which is spared (%s)"
                % (format_size(used), ", ".join(describe(h.process) for h in owners), owners[0].why),
                "Raise memory_threshold above what it needs, or stop it.",
                pid=owners[0].process.pid,
            )
        elif neighbours:
            self.reason(
                "foreign_holder",
                "%s are in use, and only %s (%s) has its node open: the context of a live peer"
                % (format_size(used), describe(neighbours[0].process), neighbours[0].why),
                "It goes when that process ends.",
                pid=neighbours[0].process.pid,
            )
        else:
            others = sorted({h.process.pid for h in self.survey.holdings if h.counts and h.gpu is not None})
            self.reason(
                "memory_no_owner",
                "%s of %s are in use, and no process here holds it"
                % (format_size(used), format_size(nvml.memory_total))
                + (" (PID %s hold other GPUs)" % _list(others) if others else ""),
                "Look on the host and in the other containers that were given this GPU; a driver of the display "
                "(nvidia_drm) holds memory too.",
            )

    def information(self, nvml: NvmlGpu) -> None:
        if nvml.utilization:
            self.note("utilization", "utilization %d %% (no proof of use)" % nvml.utilization)
        if nvml.compute_mode == _COMPUTE_PROHIBITED:
            self.note("compute_prohibited", "its compute mode is PROHIBITED: nothing can be started on it")


def invalid(survey: Survey, pid: int) -> bool:
    """Whether no process can have this pid."""
    return pid <= 0 or pid > survey.fs.pid_max()


def _memory_text(process: NvmlProcess) -> str:
    return " with %s" % format_size(process.memory) if process.memory is not None else ""


def _list(pids: t.Sequence[int]) -> str:
    return ", ".join(str(pid) for pid in pids[:8]) + (", …" if len(pids) > 8 else "")


def _stale(path: str, why: str, gpu: int | None) -> Reason:
    return Reason(
        "stale_device_node",
        "%s %s" % (show(path), why),
        "Remove it and let the driver make it anew (nvidia-modprobe -c 0 -u); in a container, restart it.",
        gpu=gpu,
        verdict=UNKNOWN,
        permanent=True,
    )


def _holder(survey: Survey, holding: Holding, gpu: Gpu | None) -> Reason:
    process = holding.process
    owner = survey.attribution(process)
    whose = ", ".join(x for x in ("user %s" % owner.user if owner.user else "", owner.container, owner.unit) if x)
    memory = None
    for listed in gpu.nvml.processes if gpu is not None and gpu.nvml is not None else ():
        if listed.pid == process.pid:
            memory = listed.memory
    foreign = not survey.in_containers(process)
    text = "%s%s %s%s" % (
        describe(process),
        " [%s]" % whose if whose else "",
        holding.why,
        ", %s" % format_size(memory) if memory else "",
    )
    if owner.unit.endswith(".service") and not owner.container and owner.manager_uid is None:
        advice = "End it with gpu_teardown, or: systemctl stop %s." % owner.unit
    else:
        advice = "End it with gpu_teardown, or protect it."
    code = "foreign_holder" if foreign else "holder"
    return Reason(code, text, advice, gpu=gpu.index if gpu else None, pid=process.pid)


def _gpu_data(survey: Survey, verdict: GpuVerdict) -> dict[str, t.Any]:
    gpu = verdict.gpu
    nvml = gpu.nvml
    memory = {process.pid: process.memory for process in nvml.processes} if nvml else {}
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "minor": gpu.minor,
        "pci": gpu.pci,
        "name": show(gpu.name),
        "verdict": verdict.verdict,
        "reasons": _codes([*verdict.reasons, *verdict.blind]),
        "notes": _codes(verdict.notes),
        "memory_used": nvml.memory_used if nvml else None,
        "memory_reserved": nvml.memory_reserved if nvml else None,
        "memory_total": nvml.memory_total if nvml else None,
        "utilization": nvml.utilization if nvml else None,
        "holders": [
            {
                "pid": holding.process.pid,
                "start_time": holding.process.start_time,
                "comm": show(holding.process.comm),
                "opened": holding.opened,
                "mapped": holding.mapped,
                "gpu_memory": memory.get(holding.process.pid),
                "reason": holding.why,
            }
            for holding in survey.of_gpu(gpu)
            if holding.counts
        ],
    }


def nvml_rows(survey: Survey) -> list[dict[str, t.Any]]:
    """NVML's lists as they are. C(in_proc): a process of this pid lives here; C(holder): it holds that GPU here."""
    rows = []
    for gpu in survey.devices.gpus:
        on_it = {holding.process.pid for holding in survey.of_gpu(gpu)}
        for process in gpu.nvml.processes if gpu.nvml is not None else ():
            rows.append(
                {
                    "gpu": gpu.index,
                    "pid": process.pid,
                    "kind": process.kind,
                    "gpu_memory": process.memory,
                    "in_proc": not invalid(survey, process.pid) and survey.process(process.pid) is not None,
                    "holder": process.pid in on_it,
                }
            )
    return rows


def scan_data(survey: Survey) -> dict[str, t.Any]:
    return {
        "complete": survey.scan.complete and not survey.confined,
        "processes": survey.scan.processes,
        "unreadable": [
            {"pid": item.pid, "comm": show(item.comm), "reason": item.why} for item in survey.scan.unreadable
        ],
    }


def _message(verdict: Verdict) -> str:
    mark = " (simulated)" if verdict.survey.simulated else ""
    total = len(verdict.gpus)
    if verdict.verdict == FREE:
        if not total:
            return "There is no GPU here, as expected%s." % mark
        return "%s free%s." % ("The GPU is" if total == 1 else "All %d GPUs are" % total, mark)
    parts = ["%s%s" % (_sentence(reason.message), mark) for reason in verdict.machine[:5]]
    bad = [gpu for gpu in verdict.gpus if gpu.verdict != FREE and gpu.reasons]
    for gpu in bad[:8]:
        shown = "; ".join(reason.message for reason in gpu.reasons[:3])
        more = len(gpu.reasons) - 3
        parts.append(
            "%s%s is %s: %s%s." % (gpu.gpu.label, mark, gpu.verdict, shown, "; %d more" % more if more > 0 else "")
        )
    if len(bad) > 8:
        parts.append("%d more GPUs are not free." % (len(bad) - 8))
    free = len([gpu for gpu in verdict.gpus if gpu.verdict == FREE])
    if bad and free:
        parts.append("%d of %d are free." % (free, total))
    advice = list(dict.fromkeys(reason.advice for reason in verdict.reasons if reason.advice))
    return " ".join(parts + advice[:3])


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def without(survey: Survey, ended: t.Collection[tuple[int, int]]) -> Survey:
    """The survey as it will be once these processes (pid, start time) have ended: for check mode.

    What NVML attributes to them goes with them, also under the pid of a parent that is gone, and as much context memory
    as a process was seen to leave unattributed.
    """
    gone = {
        holding.process.pid for holding in survey.holdings if (holding.process.pid, holding.process.start_time) in ended
    }
    replaced: dict[int, NvmlGpu] = {}
    for gpu in survey.devices.gpus:
        if gpu.nvml is None:
            continue
        ending = [holding for holding in survey.of_gpu(gpu) if holding.process.pid in gone]
        left = [holding for holding in survey.of_gpu(gpu) if holding.process.pid not in gone and holding.counts]
        forked = not left and any(not holding.nvml for holding in ending)
        taken = [
            process
            for process in gpu.nvml.processes
            if process.pid in gone
            or (forked and not invalid(survey, process.pid) and survey.process(process.pid) is None)
        ]
        used = gpu.nvml.memory_used
        if used is not None and ending:
            rest = used - sum(process.memory or 0 for process in taken)
            unknown = any(process.memory is None for process in taken)
            used = 0 if unknown or rest <= _CONTEXT * len(ending) else rest
        replaced[gpu.index] = dataclasses.replace(
            gpu.nvml, memory_used=used, processes=tuple(p for p in gpu.nvml.processes if p not in taken)
        )
    devices = dataclasses.replace(
        survey.devices,
        gpus=[_replaced(gpu, replaced.get(gpu.index)) for gpu in survey.devices.gpus],
    )
    by_index = {gpu.index: gpu for gpu in devices.gpus}
    return dataclasses.replace(
        survey,
        devices=devices,
        nvml=dataclasses.replace(survey.nvml, gpus=tuple(replaced.get(gpu.index, gpu) for gpu in survey.nvml.gpus)),
        holdings=[
            dataclasses.replace(holding, gpu=by_index[holding.gpu.index] if holding.gpu else None)
            for holding in survey.holdings
            if holding.process.pid not in gone
        ],
    )


def _replaced(gpu: Gpu, nvml: NvmlGpu | None) -> Gpu:
    return dataclasses.replace(gpu, nvml=nvml if nvml is not None else gpu.nvml)
