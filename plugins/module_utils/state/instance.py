# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Which processes belong to an instance. The only place that decides it."""

from __future__ import annotations

import re
import typing as t

from ..proc.table import Hidden, Process
from .record import InstanceRecord

#: Set for every launched process; kept readable in SGLang's titled workers by SPT_NOENV=1.
MARK = "CLEANSLATE_INSTANCE"

# Last part of cgroups that many share: slices, sessions, user managers, and the roots of containers seen from outside.
_SHARED = re.compile(
    r"(?:.*\.slice|\.lxc|init\.scope|session-.*\.scope|user@.*\.service|lxc\.(?:payload|monitor)[.].*"
    r"|(?:docker|libpod|crio|cri-containerd|machine|lxc)-.*\.scope)?"
)
_CONTAINER_ROOT = re.compile(
    r"(?:.*/)?(?:lxc|docker|libpod_parent|machine)/[^/]+(?:/ns)?|(?:.*/)?kubepods(?:/.*)?|.*\.scope/container"
)


def is_own_cgroup(path: str) -> bool:
    """Whether a cgroup can be one instance's alone: never the root of a machine or container, a slice, a session, a
    user manager. A record that names such a one says nothing about who belongs to the instance."""
    path = path.rstrip("/")
    if not path.startswith("/") or "/.." in path:
        return False
    return not _SHARED.fullmatch(path.rpartition("/")[2]) and not _CONTAINER_ROOT.fullmatch(path)


def claimed(process: Process) -> str:
    """The instance that a process names in its environment, of whatever machine or container; empty for none."""
    return (process.environ or {}).get(MARK, "")


def marked(process: Process) -> str:
    """The instance that a process says it belongs to, empty for none.

    Only in the PID namespace that is looked at: a container has records of its own, and its instance of the same name
    is another one.
    """
    name = claimed(process)
    return name if name and len(process.nspid) == 1 else ""


def _in_group(process: Process, record: InstanceRecord, boot_id: str) -> bool:
    """Whether the process is in the recorded process group, and the group still is the recorded one.

    A group's number is free again once all in it have ended, and the next owner's processes are all younger than the
    record. It is another group if the machine or the container has started anew since, or if its leader is younger
    than the instance's main process, which was in the group from the start.
    """
    if record.pgrp <= 1 or process.pgrp != record.pgrp or not 0 < record.start_time <= process.start_time:
        return False
    boot_id = boot_id or process.boot_id()
    if not boot_id or record.boot_id != boot_id or process.namespace_started() > record.start_time:
        return False
    try:
        leader = process.group_leader()
    except Hidden:
        return False
    return leader is None or leader.start_time <= record.start_time


def belongs(process: Process, record: InstanceRecord, boot_id: str = "") -> bool:
    """Whether one process is part of the recorded instance.

    It is, if its cgroup is the recorded one (or below it), or its environment carries the instance's name, or its
    process group is the recorded one and it did not start before the record's main process did. Process groups and
    start times only mean something in the boot in which they were recorded; C(boot_id) is the present one (default:
    that of the process's own /proc).
    """
    if process.kernel_thread:
        return False
    own = record.cgroup.rstrip("/")
    if is_own_cgroup(own) and (process.cgroup == own or process.cgroup.startswith(own + "/")):
        return True
    return _in_group(process, record, boot_id) or (record.name != "" and marked(process) == record.name)


def members(processes: t.Iterable[Process], record: InstanceRecord, boot_id: str = "") -> list[Process]:
    """The living processes of a recorded instance."""
    return [process for process in processes if not process.zombie and belongs(process, record, boot_id)]


def unrecorded_members(processes: t.Iterable[Process], targets: t.Collection[int]) -> list[Process]:
    """For a server that nobody recorded: the process groups of matched targets, where the group's leader is dead or
    is a target itself. A group led by a living stranger (a shell, a supervisor) is not the server's own, also when the
    stranger is not among C(processes) or hidden from this user."""
    table = {process.pid: process for process in processes}
    targets = set(targets)
    groups = set()
    for pid in targets:
        target = table.get(pid)
        if target is None or target.pgrp <= 1 or target.pgrp in groups:
            continue
        if target.pgrp in targets or not _is_led(target, table):
            groups.add(target.pgrp)
    return [p for p in table.values() if p.pgrp in groups and not p.zombie and not p.kernel_thread]


def _is_led(process: Process, table: t.Mapping[int, Process]) -> bool:
    leader = table.get(process.pgrp)
    if leader is not None:
        return not leader.zombie
    try:
        return process.group_leader() is not None
    except Hidden:
        return True
