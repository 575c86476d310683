# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Who listens on a port, by what the kernel says: LISTEN in C(/proc/net/tcp{,6}), its inode, the owner of that inode.

No bind test: it succeeds beside a live listener with another address or SO_REUSEPORT, and it fails or not on TIME_WAIT
depending on options of the dead server. Fields: Documentation/networking/proc_net_tcp.rst of Linux.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import typing as t

from ..proc.table import ProcFS

_LISTEN = 0x0A
_TIME_WAIT = 0x06


class Listener(t.NamedTuple):
    port: int
    #: Local address as text, C(0.0.0.0) and C(::) for all.
    address: str
    inode: int
    #: The processes in sight that have the socket open; empty when its owner is out of sight.
    pids: tuple[int, ...]


class PortState(t.NamedTuple):
    port: int
    listeners: list[Listener]
    #: Connections of the past that the kernel still remembers: they do not keep a server from listening.
    time_wait: int
    #: Other connections with this local port.
    connections: int

    @property
    def note(self) -> str:
        """What to know of a port that nobody listens on; empty when there is nothing."""
        if self.busy or not self.time_wait + self.connections:
            return ""
        return (
            "free; the kernel remembers %d connections of its last server, so the next one must set SO_REUSEADDR, as "
            "that one must have done (SGLang's does)" % (self.time_wait + self.connections)
        )

    @property
    def busy(self) -> bool:
        return bool(self.listeners)


class _Socket(t.NamedTuple):
    address: str
    port: int
    state: int
    inode: int


def _address(text: str) -> str:
    """An address as the kernel prints it: 32-bit words in the machine's own byte order, in hexadecimal."""
    order = "<" if sys.byteorder == "little" else ">"
    raw = b"".join(struct.pack(order + "I", int(text[at : at + 8], 16)) for at in range(0, len(text), 8))
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


def parse_sockets(table: str) -> list[_Socket]:
    """The lines of C(/proc/net/tcp) or C(tcp6). A line that is none is left out."""
    found = []
    for line in table.split("\n")[1:]:
        words = line.split()
        if len(words) < 10:
            continue
        try:
            address, _colon, port = words[1].partition(":")
            found.append(_Socket(_address(address), int(port, 16), int(words[3], 16), int(words[9])))
        except (ValueError, struct.error, OSError):
            continue
    return found


def socket_owners(fs: ProcFS, inodes: t.Collection[int], pids: t.Iterable[int] | None = None) -> dict[int, list[int]]:
    """Which processes have these sockets open, by inode. All threads are looked at: a process whose main thread has
    exited shows its descriptors only there."""
    owners: dict[int, list[int]] = {inode: [] for inode in inodes}
    if not owners:
        return owners
    wanted = {"socket:[%d]" % inode: inode for inode in owners}
    for pid in fs.pids() if pids is None else sorted(pids):
        folders = [fs.path(pid, "fd")]
        try:
            tasks = os.listdir(fs.path(pid, "task"))
        except OSError:
            tasks = []
        folders += [fs.path(pid, "task", task, "fd") for task in tasks if task != str(pid)]
        for inode in {wanted[target] for folder in folders for target in _targets(folder) if target in wanted}:
            owners[inode].append(pid)
    return owners


def _targets(folder: str) -> t.Iterator[str]:
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        try:
            yield os.readlink(os.path.join(folder, name))
        except OSError:
            continue


def look_at_ports(
    fs: ProcFS, ports: t.Iterable[int], pids: t.Iterable[int] | None = None, namespace_of: t.Iterable[int] = ()
) -> list[PortState]:
    """The state of each port, in the order asked for.

    C(pids): whose descriptors are searched for the owner (default: every process). C(namespace_of): also look into the
    network namespaces of these processes (the guests of a hypervisor), beside the caller's own.
    """
    ports = list(dict.fromkeys(ports))
    if not ports:
        return []
    files = [os.path.join(fs.root, "net", name) for name in ("tcp", "tcp6")]
    seen = set()
    for pid in namespace_of:
        namespace = fs.link(pid, "ns/net")
        if namespace is not None and namespace not in seen:
            seen.add(namespace)
            files += [fs.path(pid, "net", name) for name in ("tcp", "tcp6")]
    sockets: dict[tuple[int, int, str], _Socket] = {}
    for path in files:
        try:
            with open(path, encoding="ascii", errors="replace") as handle:
                content = handle.read()
        except OSError:
            continue
        for number, entry in enumerate(parse_sockets(content)):
            # Two names of one namespace show the same socket twice; entries without an inode are told apart by place.
            key = (entry.port, entry.inode, entry.address if entry.inode else "%s:%d" % (path, number))
            sockets[key] = entry
    wanted = [entry for entry in sockets.values() if entry.port in ports]
    owners = socket_owners(fs, {entry.inode for entry in wanted if entry.state == _LISTEN}, pids)
    states = []
    for port in ports:
        mine = [entry for entry in wanted if entry.port == port]
        listeners = [
            Listener(port, entry.address, entry.inode, tuple(owners[entry.inode]))
            for entry in mine
            if entry.state == _LISTEN
        ]
        past = sum(1 for entry in mine if entry.state == _TIME_WAIT)
        states.append(PortState(port, listeners, past, len(mine) - len(listeners) - past))
    return states
