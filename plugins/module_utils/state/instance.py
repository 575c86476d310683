# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Which processes belong to an instance. The only place that decides it."""

from __future__ import annotations

import typing as t

from ..proc.table import Process
from .record import InstanceRecord

#: Set for every launched process; kept readable in SGLang's titled workers by SPT_NOENV=1.
MARK = "CLEANSLATE_INSTANCE"


def belongs(process: Process, record: InstanceRecord, boot_id: str) -> bool:
    """Whether one process is part of the recorded instance.

    It is, if its cgroup is the recorded one (or below it), or its environment carries the instance's name, or its
    process group is the recorded one and it did not start before the record's main process did. Process groups and
    start times only mean something in the boot in which they were recorded.
    """
    if process.kernel_thread:
        return False
    same_boot = not record.boot_id or not boot_id or record.boot_id == boot_id
    if record.cgroup and (process.cgroup == record.cgroup or process.cgroup.startswith(record.cgroup + "/")):
        return True
    if same_boot and record.pgrp > 1 and process.pgrp == record.pgrp and process.start_time >= record.start_time:
        return True
    environ = process.environ
    return bool(environ) and environ is not None and environ.get(MARK) == record.name


def members(processes: t.Iterable[Process], record: InstanceRecord, boot_id: str = "") -> list[Process]:
    """The living processes of a recorded instance."""
    return [process for process in processes if not process.zombie and belongs(process, record, boot_id)]


def unrecorded_members(processes: t.Iterable[Process], targets: t.Collection[int]) -> list[Process]:
    """For a server that nobody recorded: the process groups of matched targets, where the group's leader is dead or
    is a target itself. A group led by a living stranger (a shell, a supervisor) is not the server's own."""
    table = {process.pid: process for process in processes}
    groups = set()
    for pid in targets:
        target = table.get(pid)
        if target is None or target.pgrp <= 1:
            continue
        leader = table.get(target.pgrp)
        if leader is None or leader.zombie or leader.pid in targets:
            groups.add(target.pgrp)
    return [p for p in table.values() if p.pgrp in groups and not p.zombie and not p.kernel_thread]
