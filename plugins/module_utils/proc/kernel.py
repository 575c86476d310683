# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Two questions that the kernel answers faster than text files do: what is mapped, and which threads share files.

Both fall back to what every kernel has.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import os
import platform
import re
import struct
import typing as t

from .table import Process, unescape_mount

# include/uapi/linux/fs.h, Linux 6.11: struct procmap_query.
_QUERY = struct.Struct("<QQQ QQQQQQ II II QQ")
_PROCMAP_QUERY = 0xC0686611
_SHARED, _COVERING_OR_NEXT, _FILE_BACKED = 0x08, 0x10, 0x20
_LINE = re.compile(
    rb"^([0-9a-f]+-[0-9a-f]+) ...([sp]) [0-9a-f]+ ([0-9a-f]+):([0-9a-f]+) (\d+) +(/[^\n]*)", re.MULTILINE
)


class Region(t.NamedTuple):
    """A mapped file: what the kernel calls it, not where."""

    device: int
    inode: int
    path: str
    span: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Region) and self[:3] == other[:3]

    def __hash__(self) -> int:
        return hash(self[:3])


class Mappings:
    """The files that a process has mapped.

    Since Linux 6.11 the kernel can be asked for shared mappings of files alone (ioctl PROCMAP_QUERY on C(maps)), which
    spares the text of hundreds of private mappings of libraries.
    """

    def __init__(self, shared_only: bool = True) -> None:
        self._shared_only = shared_only
        self._name = array.array("B", bytes(4096))
        self._address = self._name.buffer_info()[0]
        self._query = shared_only and struct.calcsize("P") == 8 and platform.machine() in ("x86_64", "aarch64")

    def of(self, path: str) -> t.Iterator[Region]:
        """The mapped files of one C(maps) file. Raises OSError when it is gone or may not be read."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if self._query:
                try:
                    yield from self._ask(fd)
                    return
                except OSError as error:
                    if error.errno not in (errno.ENOTTY, errno.EINVAL, errno.EOPNOTSUPP):
                        raise
                    self._query = False
            chunks = []
            while True:
                chunk = os.read(fd, 1 << 20)
                if not chunk:
                    break
                chunks.append(chunk)
        finally:
            os.close(fd)
        yield from parse_maps(b"".join(chunks), self._shared_only)

    def _ask(self, fd: int) -> t.Iterator[Region]:
        start = 0
        while True:
            try:
                buffer = self._next(fd, start, len(self._name))
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ESRCH):
                    return  # no further mapping, or no memory any more
                if error.errno != errno.ENAMETOOLONG:
                    raise
                buffer = self._next(fd, start, 0)
            fields = _QUERY.unpack(buffer)
            low, start, inode, size = fields[3], fields[4], fields[8], fields[11]
            name = self._name[: max(0, size - 1)].tobytes().decode("utf-8", "surrogateescape")
            yield Region(os.makedev(fields[9], fields[10]), inode, name, "%x-%x" % (low, start))

    def _next(self, fd: int, start: int, room: int) -> bytearray:
        flags = _COVERING_OR_NEXT | _FILE_BACKED | _SHARED
        address = self._address if room else 0
        buffer = bytearray(_QUERY.pack(_QUERY.size, flags, start, *(0,) * 8, room, 0, address, 0))
        fcntl.ioctl(fd, _PROCMAP_QUERY, buffer, True)
        return buffer


def parse_maps(text: bytes, shared_only: bool = False) -> list[Region]:
    """The files in the text of a C(maps) file, in order (proc_pid_maps(5))."""
    out = []
    for span, kind, major, minor, inode, path in _LINE.findall(text):
        if kind == b"s" or not shared_only:
            name = unescape_mount(path.decode("utf-8", "surrogateescape"))
            out.append(Region(os.makedev(int(major, 16), int(minor, 16)), int(inode), name, span.decode("ascii")))
    return out


class Files:
    """Finds threads that have descriptors of their own (C(unshare(CLONE_FILES))): rare, but C(/proc/P/fd) shows only
    the main thread's. The kernel compares two threads without listing anything (kcmp(2))."""

    _NUMBERS: t.ClassVar[dict[str, int]] = {"x86_64": 312, "aarch64": 272}
    _KCMP_FILES = 2

    def __init__(self) -> None:
        self._number = self._NUMBERS.get(platform.machine()) if struct.calcsize("P") == 8 else None
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall if self._number else None

    def strays(self, folder: str, process: Process) -> list[str]:
        """The threads of a process whose descriptors are not the main thread's."""
        if self._syscall is None or not folder.startswith("/proc/"):
            return []
        try:
            tasks = os.listdir(folder + "/task")
        except OSError:
            return []
        pid = process.pid
        out = []
        for task in tasks:
            # -1: no kcmp in this kernel, or a thread that has ended. 0: the same table.
            if int(task) != pid and self._syscall(self._number, pid, int(task), self._KCMP_FILES, 0, 0) > 0:
                out.append(task)
        return out
