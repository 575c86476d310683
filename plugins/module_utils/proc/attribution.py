# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Whose a process is: user, systemd unit, container. Read from its cgroup and status; asks no daemon.

Facts used: Proxmox puts container 129 into C(/lxc/129/ns/...) (its monitor, outside, into C(/lxc.monitor/129)); Docker
and podman name scopes C(docker-ID.scope), C(libpod-ID.scope) or folders C(/docker/ID); Kubernetes puts all below
C(kubepods); Slurm below C(slurmstepd.scope/job_N) or C(/slurm/uid_U/job_N); NSpid in C(status) lists the pid in each
PID namespace from the reader's down (proc_pid_status(5)).
"""

from __future__ import annotations

import dataclasses
import pwd
import re

from ..common.text import show
from .table import Process

_ID = r"(?P<id>[0-9a-f]{12,64})"
#: Tried in this order: the outer world first (a Docker inside an LXC container is that container's own matter).
_CONTAINERS = (
    ("lxc", re.compile(r"(?:^|/)lxc/(?P<id>\d+)/ns(?:/|$)")),
    ("lxc", re.compile(r"(?:^|/)lxc\.payload[./](?P<id>[^/]+)(?:/|$)")),
    ("lxc", re.compile(r"^/lxc/(?P<id>[^/]+)(?:/|$)")),
    ("kubernetes", re.compile(r"(?:^|/)kubepods(?:\.slice)?/(?:.*/)?(?:[a-z-]+-)?" + _ID + r"(?:\.scope)?(?:/|$)")),
    ("kubernetes", re.compile(r"(?:^|/)kubepods(?:\.slice)?/(?:.*[/-])?pod(?P<id>[0-9a-f_-]{32,36})")),
    ("slurm", re.compile(r"(?:^|/)(?:slurmstepd\.scope|slurm(?:_[^/]+)?(?:/uid_\d+)?)/job_(?P<id>\d+)(?:/|$)")),
    ("docker", re.compile(r"(?:^|/)docker[-/]" + _ID + r"(?:\.scope)?(?:/|$)")),
    ("podman", re.compile(r"(?:^|/)libpod-(?!conmon)(?:payload-)?" + _ID + r"(?:\.scope)?(?:/|$)")),
    ("containerd", re.compile(r"(?:^|/)(?:nerdctl-|cri-containerd-|crio-)" + _ID + r"(?:\.scope)?(?:/|$)")),
    ("nspawn", re.compile(r"(?:^|/)systemd-nspawn@(?P<id>[^/]+)\.service/payload(?:/|$)")),
    ("vm", re.compile(r"(?:^|/)machine-qemu\\x2d(?P<id>[^/]+)\.scope(?:/|$)")),
    ("vm", re.compile(r"(?:^|/)qemu\.slice/(?P<id>\d+)\.scope(?:/|$)")),
)
_USER_MANAGER = re.compile(r"user@(\d+)\.service")


@dataclasses.dataclass(frozen=True)
class Attribution:
    """Text in it is printable."""

    uid: int | None
    #: Name of the user, or the number where it has none here (a container has users of its own).
    user: str
    #: The unit of the system manager (the container's own, if it is in one); empty when none.
    unit: str
    #: The unit of a user's manager inside C(user@UID.service); empty when none.
    user_unit: str
    manager_uid: int | None
    #: C(lxc), C(docker), C(podman), C(containerd), C(kubernetes), C(slurm), C(nspawn), C(vm) or empty.
    container_kind: str
    #: The id whole: container, job or VM number.
    container_id: str
    host_pid: int
    #: Its pid inside its own PID namespace; the same as C(host_pid) outside of containers.
    guest_pid: int

    @property
    def container(self) -> str:
        """For people: C(lxc/129), C(docker/0123456789ab); empty when none."""
        if not self.container_kind:
            return ""
        return "%s/%s" % (
            self.container_kind,
            self.container_id[:12] if len(self.container_id) > 36 else self.container_id,
        )


def parse_cgroups(raw: bytes) -> list[str]:
    """The paths of all hierarchies in the text of C(/proc/P/cgroup), systemd's and the unified one first.

    Of these two the one that says something comes first: a container of version 2 on a machine that has both sees
    C(9:name=systemd:/) before C(0::/system.slice/x.service).
    """
    first: list[str] = []
    rest: list[str] = []
    for line in raw.decode("utf-8", "surrogateescape").split("\n"):
        hierarchy, sep, tail = line.partition(":")
        controllers, sep, path = tail.partition(":")
        if not sep or not hierarchy.isdigit():
            continue
        (first if controllers in ("", "name=systemd") else rest).append(path)
    first.sort(key=lambda path: path in ("", "/"))
    return first + rest


def container_of(paths: list[str]) -> tuple[str, str, str]:
    """Kind, id and the path inside the container, of the first container in any of the cgroup paths; else empty, and
    the first path."""
    for kind, pattern in _CONTAINERS:
        for path in paths:
            match = pattern.search(path)
            if match:
                return kind, match.group("id"), "/" + path[match.end() :].lstrip("/")
    return "", "", paths[0] if paths else ""


def units_of(path: str) -> tuple[str, str, int | None]:
    """Unit of the system manager, unit of a user's manager, that user's id, in one cgroup path (systemd.slice(5))."""
    system, user, manager = "", "", None
    for part in path.split("/"):
        part = part[1:] if part.startswith("_") else part  # cgroup_unescape(): names that would clash get an underscore
        if not part.endswith((".service", ".scope")):
            continue
        if not system:
            system = part
            match = _USER_MANAGER.fullmatch(part)
            manager = int(match.group(1)) if match else None
        elif manager is not None and not user and part != "init.scope":
            user = part
    return system, user, manager


def is_guest_init(process: Process, owner: Attribution) -> bool:
    """Whether this is the first process of an LXC container, seen from outside: with it the whole container ends."""
    return owner.container_kind == "lxc" and len(process.nspid) == 2 and owner.guest_pid == 1


def user_name(uid: int | None) -> str:
    if uid is None:
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def attribute(process: Process) -> Attribution:
    """Read whose a process is. Nothing here fails: what cannot be read stays empty."""
    paths = parse_cgroups(process.cgroup_text)
    kind, ident, inside = container_of(paths)
    # Docker and Kubernetes name the container by a scope of the host's own manager: that is no unit of the process's.
    system, user, manager = units_of(inside)
    uid = process.uid
    # A container has users of its own: the names of this machine would be wrong ones.
    foreign = bool(kind) and kind != "slurm" and uid != 0
    return Attribution(
        uid=uid,
        user=user_name(uid) if not foreign or uid is None else str(uid),
        unit=show(system),
        user_unit=show(user),
        manager_uid=manager,
        container_kind=kind,
        container_id=show(ident),
        host_pid=process.pid,
        guest_pid=process.nspid[-1],
    )
