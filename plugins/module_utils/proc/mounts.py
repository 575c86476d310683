# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Files that lie on other machines, or behind a daemon: asking about one can hang for as long as that is away.

A scan that looks for devices need not ask: a device node in use is never there. Paths come from C(/proc/P/fd) links,
which the kernel answers by itself, and are compared with the mount points of the process (proc_pid_mountinfo(5)).
"""

from __future__ import annotations

import typing as t

from .table import ProcFS, unescape_mount

#: File systems of other machines; and fuse with all that it carries.
_TYPES = frozenset(
    ["nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "afs", "beegfs", "gpfs", "wekafs", "glusterfs", "pvfs2", "ncpfs"]
)


class Mount(t.NamedTuple):
    """A mount point behind which asking may hang, and the local mounts below it."""

    point: str
    local: tuple[str, ...]

    def has(self, path: str) -> bool:
        return _below(path, self.point) and not any(_below(path, point) for point in self.local)


def _below(path: str, point: str) -> bool:
    return path == point or path.startswith(point if point.endswith("/") else point + "/")


def parse_mounts(text: bytes) -> tuple[Mount, ...]:
    """The remote mounts in the text of a C(mountinfo) file."""
    remote: list[str] = []
    local: list[str] = []
    for line in text.decode("utf-8", "surrogateescape").split("\n"):
        before, sep, after = line.partition(" - ")
        fields = before.split(" ")
        if not sep or len(fields) < 5:
            continue
        kind = after.split(" ")[0]
        (remote if kind in _TYPES or kind.startswith("fuse") else local).append(unescape_mount(fields[4]))
    return tuple(Mount(point, tuple(other for other in local if _below(other, point))) for point in sorted(set(remote)))


class RemoteFiles:
    """Says which paths of which process lie on remote mounts. Costs nothing where no such file system is in use."""

    def __init__(self, fs: ProcFS) -> None:
        self._fs = fs
        self._by_namespace: dict[str, tuple[Mount, ...]] = {}
        try:
            with open(fs.root + "/filesystems", encoding="ascii", errors="replace") as handle:
                loaded = {line.split()[-1] for line in handle if line.strip()}
        except OSError:
            loaded = set()
        # A container mounts what it likes: its mounts are looked at when the kernel knows any remote file system.
        self.possible = bool(loaded & _TYPES) or bool(parse_mounts(self._read("self")))

    def _read(self, who: str) -> bytes:
        try:
            with open("%s/%s/mountinfo" % (self._fs.root, who), "rb") as handle:
                return handle.read()
        except OSError:
            return b""

    def of(self, pid: int) -> tuple[Mount, ...]:
        """The remote mounts that this process sees."""
        namespace = self._fs.link(pid, "ns/mnt") or str(pid)
        if namespace not in self._by_namespace:
            self._by_namespace[namespace] = parse_mounts(self._read(str(pid)))
        return self._by_namespace[namespace]
