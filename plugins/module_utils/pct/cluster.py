# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""All containers of a Proxmox VE cluster out of one reading of a few files on any of its nodes.

Facts: pmxcfs shows every node's configurations on every node, in C(/etc/pve/nodes/NODE/lxc/VMID.conf); C(.members) is
JSON with each node's address and whether it is online; C(.rrd) has a line C(pve2.3-vm/VMID:UPTIME:NAME:STATUS:...) (or
C(pve-vm-9.0/...)) a guest, as each node last told it (pve-manager, PVE/Service/pvestatd.pm); a container runs when the
socket of its LXC monitor, C(@/var/lib/lxc/VMID/command), is in C(/proc/net/unix), which is how Proxmox VE itself tells
(PVE/LXC.pm, list_active_containers); C(user.cfg) has C(pool:NAME:COMMENT:VMID,VMID:STORAGES:) (pve-access-control).
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing as t

from .conf import GuestConf, parse_conf
from .devices import handed, shared_gpus

PVE = "/etc/pve"
#: What a reading consists of; C(grep -aH "") shows each line behind its file's name, all in one process.
FILES = (
    "/etc/pve/nodes/*/lxc/*.conf",
    "/etc/pve/user.cfg",
    "/etc/pve/.members",
    "/etc/pve/.rrd",
    "/proc/net/unix",
    "/proc/sys/kernel/hostname",
)
NO_PVE = "cleanslate: no /etc/pve/nodes"
#: A line for the node's shell; it writes the reading to stdout and what it could not read to stderr.
READ = "cd %s/nodes 2>/dev/null || { echo '%s' >&2; exit 64; }; LC_ALL=C; export LC_ALL; exec grep -aH '' %s" % (
    PVE,
    NO_PVE,
    " ".join(FILES),
)

_CONF = re.compile(r"/etc/pve/nodes/([^/]+)/lxc/([1-9][0-9]*)\.conf", re.ASCII)
_SOCKET = re.compile(r"\s@/var/lib/lxc/([1-9][0-9]*)/command$", re.ASCII | re.MULTILINE)
_RRD = re.compile(r"^(?:pve2\.3-vm|pve-vm-[0-9.]+)/([1-9][0-9]*):[^:]*:[^:]*:([a-z]+):", re.ASCII | re.MULTILINE)

RUNNING, STOPPED, UNKNOWN = "running", "stopped", "unknown"


@dataclasses.dataclass(frozen=True)
class Node:
    name: str
    #: As the cluster itself has it; empty where it does not say.
    address: str = ""
    #: None where the cluster does not say, as on a node that is alone.
    online: bool | None = None
    #: The one that was read.
    local: bool = False


@dataclasses.dataclass(frozen=True)
class Guest:
    vmid: int
    node: str
    conf: GuestConf
    #: C(running), C(stopped), or C(unknown) where its node has not said.
    status: str
    pool: str = ""
    #: N of each C(/dev/nvidiaN) of its node that it is given, and all paths below C(/dev).
    gpus: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()
    #: Other containers of its node that are given one of these GPUs.
    shared_with: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.conf.name(self.vmid)


@dataclasses.dataclass(frozen=True)
class Cluster:
    nodes: t.Mapping[str, Node]
    guests: tuple[Guest, ...]
    #: Ids that more than one node has, with those nodes: a reading in the middle of a migration.
    doubtful: t.Mapping[int, tuple[str, ...]]


def running_here(proc_net_unix: str) -> set[int]:
    """Ids of the containers whose monitor's socket is in the text of C(/proc/net/unix)."""
    return {int(vmid) for vmid in _SOCKET.findall(proc_net_unix)}


def files_of(reading: str) -> dict[str, str]:
    """The files of a reading by their paths, lines ended by newlines."""
    files: dict[str, list[str]] = {}
    for line in reading.split("\n"):
        path, colon, text = line.partition(":")
        if colon and path.startswith("/"):
            files.setdefault(path, []).append(text)
    return {path: "\n".join(lines) + "\n" for path, lines in files.items()}


def pools_of(user_cfg: str) -> dict[int, str]:
    """Guest id -> pool; a guest is in one pool at most."""
    out: dict[int, str] = {}
    for line in user_cfg.split("\n"):
        fields = line.split(":")
        if fields[0] == "pool" and len(fields) > 3:
            for vmid in re.split(r"[,;\s]+", fields[3]):
                if vmid.isdigit():
                    out[int(vmid)] = fields[1]
    return out


def nodes_of(members: str, local: str, names: t.Iterable[str]) -> dict[str, Node]:
    """All nodes: those of C(.members) and those that have a folder."""
    listed: t.Mapping[str, t.Any] = {}
    try:
        loaded = json.loads(members)
        if isinstance(loaded, dict):
            local = str(loaded.get("nodename") or local)
            if isinstance(loaded.get("nodelist"), dict):
                listed = loaded["nodelist"]
    except ValueError:
        pass  # a node that is alone, or a file that was being written: then the folders are what is known
    out: dict[str, Node] = {}
    for name in sorted({*names, *listed, *([local] if local else [])}):
        told = listed.get(name)
        told = told if isinstance(told, dict) else {}
        online = bool(told["online"]) if "online" in told else None
        out[name] = Node(name, str(told.get("ip") or ""), online, name == local)
    return out


def parse_reading(reading: str) -> Cluster:
    """Put a reading together; never fails, whatever the files hold."""
    files = files_of(reading)
    found: dict[int, list[tuple[str, str]]] = {}
    for path, text in files.items():
        match = _CONF.fullmatch(path)
        if match:
            found.setdefault(int(match.group(2)), []).append((match.group(1), text))
    short = files.get("/proc/sys/kernel/hostname", "").strip().split(".")[0]
    nodes = nodes_of(
        files.get(PVE + "/.members", ""), short, {node for places in found.values() for node, _text in places}
    )
    pools = pools_of(files.get(PVE + "/user.cfg", ""))
    sockets = files.get("/proc/net/unix")
    here = running_here(sockets) if sockets is not None else None
    told = {int(vmid): status for vmid, status in _RRD.findall(files.get(PVE + "/.rrd", ""))}
    guests: list[Guest] = []
    for vmid in sorted(found):
        for node, text in found[vmid]:
            status = _status(vmid, nodes[node], here, told)
            guests.append(_guest(vmid, node, text, status, pools.get(vmid, "")))
    doubtful = {
        vmid: tuple(sorted(node for node, _text in places)) for vmid, places in found.items() if len(places) > 1
    }
    return Cluster(nodes, tuple(_with_neighbours(guests)), doubtful)


def _status(vmid: int, node: Node, here: set[int] | None, told: t.Mapping[int, str]) -> str:
    if node.local and here is not None:
        return RUNNING if vmid in here else STOPPED
    # What an offline node said last is no longer true.
    status = told.get(vmid, "") if node.online is not False else ""
    return status if status in (RUNNING, STOPPED) else UNKNOWN


def _guest(vmid: int, node: str, text: str, status: str, pool: str) -> Guest:
    conf = parse_conf(text)
    devices = handed(conf)
    return Guest(vmid, node, conf, status, pool, tuple(devices.gpus), tuple(devices.sources))


def _with_neighbours(guests: t.Sequence[Guest]) -> t.Iterator[Guest]:
    """Templates never run, so nothing is shared with them."""
    given: dict[str, dict[int, tuple[int, ...]]] = {}
    for guest in guests:
        if not guest.conf.template:
            given.setdefault(guest.node, {})[guest.vmid] = guest.gpus
    shared = {node: shared_gpus(theirs) for node, theirs in given.items()}
    for guest in guests:
        there = shared.get(guest.node, {})
        others = {vmid for gpu in guest.gpus for vmid in there.get(gpu, ())} - {guest.vmid}
        yield guest if guest.conf.template else dataclasses.replace(guest, shared_with=tuple(sorted(others)))
