# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Who has certain files open or mapped. Device nodes are recognised by their number, plain files by their inode.

Facts used (proc(5), measured on Linux 6.18): one device may have many nodes, and C(fuser) knows only the inode of the
one it was given, so a holder of another node, or of a deleted one, is found by C(st_rdev) alone; C(/proc/P/fd) of a
process whose main thread has exited is empty while C(/proc/P/task/T/fd) of a living thread is not; a mapping outlives
the descriptor and shows only in C(maps), whose device field is the file system's and never C(st_rdev).
"""

from __future__ import annotations

import dataclasses
import errno
import os
import pickle
import signal
import stat as st
import typing as t

from .kernel import Files, Mappings, Region
from .mounts import Mount, RemoteFiles
from .table import Hidden, Process, ProcFS, Vanished

#: ("c", device number) of a character device, or ("f", file system's device number, inode) of a plain file or socket.
Key = tuple[t.Any, ...]
#: At most so many processes share a scan, and each has at least so many to look at.
_HELPERS = 4
_SHARE = 300
Stat = t.Callable[[str], os.stat_result]


def key_of(status: os.stat_result) -> Key | None:
    """What an open file is recognised by; None for what is never watched (folders, pipes)."""
    if st.S_ISCHR(status.st_mode):
        return ("c", status.st_rdev)
    if st.S_ISREG(status.st_mode) or st.S_ISSOCK(status.st_mode):
        return ("f", status.st_dev, status.st_ino)
    return None


def key_for_path(path: str, stat: Stat = os.stat) -> Key | None:
    """The key of the file at C(path); None when there is none. Follows symlinks."""
    try:
        return key_of(stat(path))
    except OSError:
        return None


@dataclasses.dataclass(frozen=True)
class Watch:
    """What to look for."""

    keys: frozenset[Key]
    #: Whole base names under which a watched device may have been mapped: for a mapped node that is deleted since, or
    #: lies where it cannot be looked at. Maps a name (C(nvidia0)) to its key.
    names: t.Mapping[str, Key] = dataclasses.field(default_factory=dict)
    #: Whether private mappings count too. They do for plain files; drivers of devices are mapped shared.
    private: bool = False


@dataclasses.dataclass(frozen=True)
class Found:
    """A process that has something of what is watched."""

    process: Process
    opened: frozenset[Key]
    mapped: frozenset[Key]
    #: Its main thread has exited: C(fuser) and C(lsof) do not see it.
    thread_only: bool = False

    @property
    def keys(self) -> frozenset[Key]:
        return self.opened | self.mapped


@dataclasses.dataclass(frozen=True)
class Unreadable:
    """A process in scope that could not be looked at, so that nothing can be said of it."""

    pid: int
    comm: str
    why: str


@dataclasses.dataclass
class ScanResult:
    #: Every process in scope by pid, holders or not.
    table: dict[int, Process] = dataclasses.field(default_factory=dict)
    found: dict[int, Found] = dataclasses.field(default_factory=dict)
    unreadable: list[Unreadable] = dataclasses.field(default_factory=list)
    #: How many processes were looked at; kernel threads and those that vanished meanwhile are none.
    processes: int = 0

    @property
    def complete(self) -> bool:
        return not self.unreadable


_GONE = (errno.ENOENT, errno.ESRCH, errno.ENOTDIR, errno.EBADF)
# What a file system answers that has lost its server or its daemon. Where devices are looked for it is none.
_AWAY = (errno.ESTALE, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ETIMEDOUT, errno.EREMOTEIO)


class _Denied(Exception):
    """The process is there and cannot be looked at."""


def _failed(error: OSError, what: str) -> Exception:
    """What an error says of the process: that it is gone, or that it cannot be looked at."""
    if error.errno in _GONE:
        return Vanished(what)
    return _Denied("%s (%s)" % (what, os.strerror(error.errno or 0)))


def _on(mounts: tuple[Mount, ...], path: str) -> bool:
    return any(mount.has(path) for mount in mounts)


class Held(t.NamedTuple):
    opened: set[Key]
    mapped: set[Key]
    thread_only: bool = False


class _Look(t.NamedTuple):
    """What became of the look at one process; plain enough to be sent by a helper."""

    pid: int
    #: Its line of C(stat), None when it is hidden.
    stat: bytes | None
    #: Whether its files were looked at.
    counted: bool = False
    held: Held | None = None
    #: Why it could not be looked at.
    denied: str = ""


class _Scanner:
    def __init__(self, fs: ProcFS, watch: Watch, stat: Stat) -> None:
        self.fs = fs
        self.watch = watch
        self.stat = stat
        self.numbers = frozenset(key[1] for key in watch.keys if key[0] == "c")
        self.inodes = {key[2]: key for key in watch.keys if key[0] == "f"}
        self.mappings = Mappings(shared_only=not watch.private)
        self.files = Files()
        self.remote = RemoteFiles(fs)
        #: What a mapped file was found to be: the same libraries and segments are mapped by many processes.
        self.known: dict[Region, Key | None] = {}

    def mounts(self, pid: int) -> tuple[Mount, ...]:
        """Where files of this process must not be asked about. Stand-ins may lie anywhere, devices in use do not."""
        return self.remote.of(pid) if self.remote.possible and not self.watch.private else ()

    def descriptors(self, folder: str, mounts: tuple[Mount, ...]) -> tuple[set[Key], int]:
        """The watched files open in one C(fd) folder, and how many are open. Raises Vanished, _Denied."""
        try:
            names = os.listdir(folder)
        except OSError as error:
            raise _failed(error, "its descriptors cannot be listed") from None
        out: set[Key] = set()
        denied = 0
        numbers, inodes, stat = self.numbers, self.inodes, self.stat
        folder += "/"
        for name in names:
            try:
                if mounts and _on(mounts, os.readlink(folder + name)):
                    continue
                status = stat(folder + name)
            except OSError as error:
                # Gone is: closed meanwhile.
                if error.errno not in _GONE and error.errno not in _AWAY:
                    denied += 1
                continue
            if status.st_rdev in numbers or status.st_ino in inodes:
                key = key_of(status)
                if key in self.watch.keys:
                    out.add(key)
        if denied:
            raise _Denied("%d of its %d descriptors may not be looked at" % (denied, len(names)))
        return out, len(names)

    def mapped(self, folder: str, mounts: tuple[Mount, ...]) -> set[Key]:
        """The watched files mapped by one process. Raises Vanished, _Denied."""
        out: set[Key] = set()
        try:
            for region in self.mappings.of(folder + "/maps"):
                if mounts and _on(mounts, region.path):
                    continue
                if region not in self.known:
                    self.known[region] = self.recognise(folder, region)
                key = self.known[region]
                if key is not None:
                    out.add(key)
        except OSError as error:
            raise _failed(error, "its mappings cannot be read") from None
        return out

    def recognise(self, folder: str, region: Region) -> Key | None:
        """The key of one mapped file, None when it is not watched."""
        plain: Key = ("f", region.device, region.inode)
        if plain in self.watch.keys:
            return plain
        path, deleted, _end = region.path.partition(" (deleted)")
        name = path.rpartition("/")[2]
        if not self.numbers and region.inode not in self.inodes and name not in self.watch.names:
            return None
        # The file itself, as the process sees it: first the mapping's own link (root only), then its path, which
        # counts only if the inode is still the mapped one.
        links = [(folder + "/map_files/" + region.span, False)]
        if not deleted:
            links.append((folder + "/root" + path, True))
        for link, compare in links:
            try:
                status = self.stat(link)
            except OSError:
                continue
            if compare and status.st_ino != region.inode:
                continue
            key = key_of(status)
            return key if key in self.watch.keys else None
        # Nobody can say: what has the inode or the name of something watched counts as it.
        return self.inodes.get(region.inode) or self.watch.names.get(name)

    def look(self, process: Process) -> Held:
        """What one process has of what is watched. Raises Vanished, _Denied."""
        folder = self.fs.path(process.pid)
        mounts = self.mounts(process.pid)
        if process.state not in "ZX":
            opened, count = self.descriptors(folder + "/fd", mounts)
            mapped = self.mapped(folder, mounts)
            # With nothing open and nothing mapped its main thread may just have exited, and others may hold on.
            if count or mapped or process.threads < 2:
                for task in self.files.strays(folder, process) if process.threads > 1 else ():
                    opened |= self._of_task(folder + "/task/" + task, mounts)
                return Held(opened, mapped)
        opened, mapped = set(), set()
        for task in self._tasks(folder):
            if task != str(process.pid):
                opened |= self._of_task(folder + "/task/" + task, mounts)
                try:
                    mapped |= self.mapped(folder + "/task/" + task, mounts)
                except Vanished:
                    continue
        return Held(opened, mapped, thread_only=True)

    def _of_task(self, folder: str, mounts: tuple[Mount, ...]) -> set[Key]:
        try:
            return self.descriptors(folder + "/fd", mounts)[0]
        except Vanished:
            return set()

    @staticmethod
    def _tasks(folder: str) -> list[str]:
        try:
            return os.listdir(folder + "/task")
        except OSError:
            raise Vanished(folder) from None


def _in_scope(process: Process, fs: ProcFS, uids: t.Collection[int], stat: Stat) -> bool:
    try:
        owner = stat(fs.path(process.pid)).st_uid
    except OSError:
        return False
    # The folder of a process that may not be dumped belongs to root, whoever runs it.
    return owner in uids if owner else process.uid in uids


class _Work:
    """The looks at many processes; shared among helpers where there are many and processors to spare."""

    def __init__(self, scanner: _Scanner, uids: t.Collection[int] | None, skip: t.Collection[int]) -> None:
        self.scanner = scanner
        self.uids = uids
        self.skip = skip

    def one(self, pid: int) -> _Look | None:
        """None when the process is gone or out of scope."""
        fs = self.scanner.fs
        try:
            process = fs.process(pid)
            if self.uids is not None and not _in_scope(process, fs, self.uids, self.scanner.stat):
                return None
            if process.kernel_thread or process.zombie or pid in self.skip:
                return _Look(pid, process.raw)
            try:
                held = self.scanner.look(process)
            except _Denied as error:
                # The files of a process that is about to end belong to root: nothing is kept from us then.
                now = fs.process(pid)
                if now.zombie or now.start_time != process.start_time:
                    return _Look(pid, now.raw)
                return _Look(pid, process.raw, counted=True, denied=str(error))
        except Hidden:
            return _Look(pid, None, denied="this user may know nothing of it (hidepid)")
        except Vanished:
            return None
        return _Look(pid, process.raw, counted=True, held=held if held.opened or held.mapped else None)

    def part(self, pids: t.Iterable[int]) -> list[_Look]:
        return [look for look in map(self.one, pids) if look is not None]

    def all(self, pids: t.Sequence[int]) -> list[_Look]:
        count = min(_HELPERS, len(os.sched_getaffinity(0)), len(pids) // _SHARE)
        if count < 2:
            return self.part(pids)
        parts = [pids[number::count] for number in range(count)]
        helpers = [_Helper(self, part) for part in parts[1:]]
        try:
            looks = self.part(parts[0])
            for helper, part in zip(helpers, parts[1:]):
                answer = helper.answer()
                looks += self.part(part) if answer is None else answer
        finally:
            for helper in helpers:
                helper.close()
        return looks


class _Helper:
    """A forked copy of this process that takes a part of the looks: most of a scan is spent in the kernel."""

    def __init__(self, work: _Work, pids: t.Sequence[int]) -> None:
        self._from, answer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                os.close(self._from)
                data = pickle.dumps(work.part(pids))
                while data:
                    data = data[os.write(answer, data) :]
                code = 0
            finally:
                os._exit(code)
        os.close(answer)

    def answer(self) -> list[_Look] | None:
        """The looks; None when the helper failed, so that they must be done without it."""
        chunks = []
        while True:
            chunk = os.read(self._from, 1 << 20)
            if not chunk:
                break
            chunks.append(chunk)
        _pid, status = os.waitpid(self._pid, 0)
        self._pid = 0
        return pickle.loads(b"".join(chunks)) if status == 0 else None

    def close(self) -> None:
        os.close(self._from)
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


def _stays(process: Process, fs: ProcFS) -> bool:
    """Read who a holder is while it is there; False when it has ended meanwhile, and so let go."""
    process.keep()
    try:
        now = fs.process(process.pid)
    except Hidden:
        return True
    except Vanished:
        return False
    return now.start_time == process.start_time and not now.zombie


def scan(
    fs: ProcFS,
    watch: Watch,
    pids: t.Iterable[int] | None = None,
    uids: t.Collection[int] | None = None,
    skip: t.Collection[int] = (),
    stat: Stat = os.stat,
) -> ScanResult:
    """Look at every process once and return those that have a watched file open or mapped.

    C(pids) confines the look to these; C(uids) to processes of these real user ids; C(skip) leaves pids out.
    A process that may not be looked at is listed as unreadable; one that ended meanwhile is not.
    """
    result = ScanResult()
    every = fs.pids()
    if pids is None and fs.root == "/proc" and 1 not in every:
        result.unreadable.append(Unreadable(1, "", "processes of other users are hidden from this one (hidepid)"))
    chosen = every if pids is None else sorted(set(every).intersection(pids))
    for look in sorted(_Work(_Scanner(fs, watch, stat), uids, skip).all(chosen)):
        process = Process(fs, look.pid, look.stat) if look.stat is not None else None
        if process is not None:
            result.table[look.pid] = process
        result.processes += look.counted
        if look.denied:
            result.unreadable.append(Unreadable(look.pid, process.comm if process else "", look.denied))
        elif look.held is not None and process is not None and _stays(process, fs):
            held = look.held
            found = Found(process, frozenset(held.opened), frozenset(held.mapped), held.thread_only)
            result.found[look.pid] = found
    return result
