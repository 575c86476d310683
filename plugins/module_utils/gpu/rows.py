# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""The row that describes a process, the same in every result of this collection."""

from __future__ import annotations

import typing as t

from ..common.text import command_line, show
from ..proc.attribution import attribute
from ..proc.table import Process
from .survey import BENIGN, NEIGHBOUR, UNPROVEN, USE, Holding, Survey

_DECISIONS = {USE: "holder", UNPROVEN: "holder", NEIGHBOUR: "neighbour", BENIGN: "benign"}


def row(
    process: Process,
    decision: str,
    reason: str,
    survey: Survey | None = None,
    devices: t.Sequence[str] | None = None,
    **extra: t.Any,
) -> dict[str, t.Any]:
    """Everything that a person needs to know about a process, printable and without secrets.

    C(start_time) is in clock ticks since boot; C(gpu_memory) in bytes over all GPUs, None when NVML says nothing.
    """
    owner = survey.attribution(process) if survey else attribute(process)
    if devices is None:
        devices = survey.labels_of(process.pid) if survey else []
    return {
        "pid": process.pid,
        "start_time": process.start_time,
        "user": owner.user,
        "comm": show(process.comm),
        "cmdline": command_line(process.argv),
        "devices": [show(device) for device in devices],
        "gpus": used_gpus(survey, process.pid) if survey else [],
        "unit": owner.unit,
        "container": owner.container,
        "guest_pid": owner.guest_pid,
        "gpu_memory": survey.memory_of(process.pid) if survey else None,
        "decision": decision,
        "reason": reason,
        **extra,
    }


def used_gpus(survey: Survey, pid: int) -> list[int]:
    """NVML indices of the GPUs that it uses, or may use for all that is known: a node that is only open is no use."""
    return sorted({h.gpu.index for h in survey.of_process(pid) if h.gpu is not None and h.kind != NEIGHBOUR})


def describe(process: Process) -> str:
    """A process in a sentence: C(PID 471 (sglang::scheduler_TP0))."""
    return "PID %d (%s)" % (process.pid, command_line(process.argv, limit=60) or show(process.comm))


def holder_rows(
    survey: Survey, kinds: t.Collection[str] = (USE, UNPROVEN), selected: bool = True
) -> list[dict[str, t.Any]]:
    """One row for each process with a holding of these kinds on a selected GPU (or on any), by pid."""
    by_pid: dict[int, list[Holding]] = {}
    for holding in survey.holdings:
        if holding.kind in kinds and (not selected or holding.gpu is None or holding.gpu.selected):
            by_pid.setdefault(holding.process.pid, []).append(holding)
    return [_row_of(survey, by_pid[pid]) for pid in sorted(by_pid)]


def _row_of(survey: Survey, holdings: list[Holding]) -> dict[str, t.Any]:
    process = holdings[0].process
    whys: dict[str, list[str]] = {}
    for holding in holdings:
        whys.setdefault(holding.why, []).append(holding.gpu.label if holding.gpu else "")
    reason = "; ".join("%s: %s" % (", ".join(labels), why) if any(labels) else why for why, labels in whys.items())
    found = survey.scan.found.get(process.pid)
    if found is not None and found.thread_only:
        threads = process.threads - 1
        reason += " (zombie leader, %d live thread%s)" % (threads, "" if threads == 1 else "s")
    instance = survey.instance_of(process)
    if instance:
        reason += " (instance %s)" % instance
    return row(process, _DECISIONS[holdings[0].kind], reason, survey)
