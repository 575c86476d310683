# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Remove what dead servers left in shared memory and temporary folders, and nothing else.

These folders are writable for everybody, so names prove nothing: a file goes only if its name is on the allow-list, it
is a plain file or socket with one link and a permitted owner, its maker is dead or it is old enough, and nobody has it
open, mapped or locked. Everything is done relative to the opened folder; no symlink is followed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import signal
import socket
import stat as st
import time
import typing as t

from ..common.errors import CleanslateError
from ..common.text import show
from ..proc.attribution import user_name
from ..proc.scan import Key, ScanResult, Watch, key_of, scan
from ..proc.table import ProcFS, Vanished
from .names import LOOKALIKE, SHM, SOCKET, TMP, Kind, kinds_of, pid_in

#: Folders that everybody on the machine shares: there a look at some processes only proves nothing.
SYSTEM_FOLDERS = ("/dev/shm", "/run/shm", "/tmp", "/var/tmp")
#: Seconds that a name without a pid must be old.
DEFAULT_AGE = 60.0


@dataclasses.dataclass(frozen=True)
class SweepOptions:
    shm_dir: str = "/dev/shm"
    tmp_dir: str = "/tmp"
    #: Also names that do not say whose they are.
    unattributable: bool = False
    #: Seconds that a file must be old; None: 0 for names with a pid, else DEFAULT_AGE.
    min_age: float | None = None
    #: Only files and processes of these users; None: everybody's.
    uids: frozenset[int] | None = None
    #: Unreadable processes are listed and do not count (private folders only).
    simulated: bool = False

    def check(self) -> SweepOptions:
        """Raises CleanslateError naming the option and the mend."""
        for option, path in (("shm_dir", self.shm_dir), ("tmp_dir", self.tmp_dir)):
            if not os.path.isabs(path) or os.path.normpath(path) == "/":
                raise CleanslateError(
                    "%s: %s is no folder to sweep. Write an absolute path." % (option, show(path)), option=option
                )
        if self.min_age is not None and not 0 <= self.min_age < float("inf"):
            raise CleanslateError("min_age: must be 0 or more seconds.", option="min_age")
        return self


@dataclasses.dataclass
class Swept:
    removed: list[dict[str, t.Any]] = dataclasses.field(default_factory=list)
    kept: list[dict[str, t.Any]] = dataclasses.field(default_factory=list)
    #: Bytes of storage that are free again.
    freed: int = 0
    warnings: list[str] = dataclasses.field(default_factory=list)
    complete: bool = True
    unreadable: list[dict[str, t.Any]] = dataclasses.field(default_factory=list)


class _Folder:
    """An opened folder: what is done in it is done relative to it."""

    def __init__(self, path: str, fd: int, kinds: tuple[Kind, ...]) -> None:
        self.path = path
        self.fd = fd
        self.kinds = kinds
        status = os.fstat(fd)
        self.device = status.st_dev
        self.identity = (status.st_dev, status.st_ino)
        self.system = any(self._same(other) for other in SYSTEM_FOLDERS)

    def _same(self, other: str) -> bool:
        with contextlib.suppress(OSError):
            status = os.stat(other)
            return (status.st_dev, status.st_ino) == self.identity
        return False


class _Candidate:
    def __init__(self, folder: _Folder, name: str, kind: Kind, status: os.stat_result) -> None:
        self.folder = folder
        self.name = name
        self.kind = kind
        self.status = status
        self.pid = pid_in(name, kind)

    @property
    def path(self) -> str:
        return os.path.join(self.folder.path, self.name)

    @property
    def key(self) -> Key | None:
        return key_of(self.status)

    @property
    def size(self) -> int:
        return self.status.st_blocks * 512

    def unchanged(self) -> bool:
        """Whether the name still leads to the very file that was judged."""
        try:
            now = os.stat(self.name, dir_fd=self.folder.fd, follow_symlinks=False)
        except OSError:
            return False
        same = ("st_dev", "st_ino", "st_mode", "st_uid", "st_nlink", "st_mtime_ns")
        return all(getattr(now, field) == getattr(self.status, field) for field in same)

    def row(self, **extra: t.Any) -> dict[str, t.Any]:
        return {
            "path": show(self.path),
            "kind": self.kind.name,
            "size": self.size,
            "owner": show(user_name(self.status.st_uid)),
            **extra,
        }


def _open_folder(path: str, option: str, kinds: tuple[Kind, ...]) -> _Folder | None:
    """None when there is no such folder. Raises CleanslateError when others could swap files in it under our hands."""
    real = os.path.realpath(path)
    try:
        fd = os.open(real, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CleanslateError(
            "%s: %s cannot be opened: %s." % (option, show(path), os.strerror(error.errno or 0)), option=option
        ) from None
    status = os.fstat(fd)
    if status.st_uid not in (0, os.geteuid()):
        os.close(fd)
        raise CleanslateError(
            "%s: %s belongs to user %s, who may swap files in it while they are removed. Run as that user."
            % (option, show(path), show(user_name(status.st_uid))),
            option=option,
        )
    if status.st_mode & 0o022 and not status.st_mode & st.S_ISVTX:
        os.close(fd)
        raise CleanslateError(
            "%s: others may write to %s, which lacks the sticky bit, so they may swap files in it while they are "
            "removed. Run chmod +t on it." % (option, show(path)),
            option=option,
        )
    return _Folder(path, fd, kinds)


class _Sweeper:
    def __init__(self, options: SweepOptions, fs: ProcFS, pids: t.Iterable[int] | None, now: float) -> None:
        self.options = options
        self.fs = fs
        self.pids = None if pids is None else list(pids)
        self.now = now
        self.result = Swept()
        self.folders: list[_Folder] = []
        self._alive: set[int] | None = None
        self._bound: set[str] | None = None

    # -- looking ------------------------------------------------------------------------------------------------

    def open_folders(self) -> None:
        for path, option, kinds in ((self.options.shm_dir, "shm_dir", SHM), (self.options.tmp_dir, "tmp_dir", TMP)):
            folder = _open_folder(path, option, kinds)
            if folder is None:
                continue
            same = next((other for other in self.folders if other.identity == folder.identity), None)
            if same is not None:
                os.close(folder.fd)
                same.kinds += kinds
            else:
                self.folders.append(folder)

    def close(self) -> None:
        for folder in self.folders:
            os.close(folder.fd)

    def keep(self, candidate: _Candidate, reason: str, detail: str = "") -> None:
        self.result.kept.append(candidate.row(reason=reason, detail=show(detail)))

    def candidates(self) -> list[_Candidate]:
        """Everything whose name, type, owner and age allow it; the rest of the allow-listed names is kept and told."""
        found = []
        for folder in self.folders:
            for name in sorted(os.listdir(folder.fd)):
                kinds = kinds_of(name, folder.kinds)
                if not kinds and LOOKALIKE.match(name) is None:
                    continue
                try:
                    status = os.stat(name, dir_fd=folder.fd, follow_symlinks=False)
                except OSError:
                    continue
                if not kinds:
                    unknown = Kind("unknown", LOOKALIKE, "file")
                    self.keep(
                        _Candidate(folder, name, unknown, status), "not_listed", "the name is not on the allow-list"
                    )
                    continue
                wanted = SOCKET if st.S_ISSOCK(status.st_mode) else "file" if st.S_ISREG(status.st_mode) else ""
                kind = next((kind for kind in kinds if kind.type == wanted), kinds[0])
                candidate = _Candidate(folder, name, kind, status)
                why = self.static_reason(candidate, wanted)
                if why is not None:
                    self.keep(candidate, *why)
                else:
                    found.append(candidate)
        return found

    def static_reason(self, candidate: _Candidate, wanted: str) -> tuple[str, str] | None:
        """Why a file is kept by what it is, before anybody's use of it is looked at."""
        status, kind, options = candidate.status, candidate.kind, self.options
        if kind.type != wanted:
            form = "a symlink" if st.S_ISLNK(status.st_mode) else "a " + (wanted or "special file or folder")
            return "wrong_type", "%s under this name was put there by somebody else" % form
        if status.st_nlink != 1:
            return "hard_link", "it has %d names" % status.st_nlink
        if status.st_dev != candidate.folder.device:
            return "wrong_type", "something is mounted on it"
        owners = options.uids if options.uids is not None else None if os.geteuid() == 0 else {os.geteuid()}
        if owners is not None and status.st_uid not in owners:
            return "foreign_owner", "it belongs to " + user_name(status.st_uid)
        if not kind.attributable and not options.unattributable:
            return "unattributable", "the name does not say whose it is"
        if kind.empty and status.st_size:
            return "not_empty", "only empty files of this name are residue"
        least = options.min_age
        if least is None:
            least = 0.0 if candidate.pid is not None else DEFAULT_AGE
        age = self.now - status.st_mtime
        if least > 0 and age < least:
            return "too_young", "%.0f s old, min_age is %.0f s" % (max(age, 0.0), least)
        if candidate.pid is not None and candidate.pid in self.alive:
            return "process_alive", "process %d lives" % candidate.pid
        return None

    @property
    def alive(self) -> set[int]:
        """Every pid in use, in this PID namespace and in those below it."""
        if self._alive is None:
            inner: set[int] = set()
            self._alive = set(self.fs.pids())
            for pid in self._alive if self.pids is None else self.pids:
                with contextlib.suppress(Vanished):
                    inner.update(self.fs.process(pid).nspid)
            self._alive |= inner
        return self._alive

    @property
    def bound(self) -> set[str]:
        """Base names of all bound unix sockets, in every network namespace in sight."""
        if self._bound is None:
            self._bound = set()
            tables: dict[str | None, str] = {None: os.path.join(self.fs.root, "net/unix")}
            for pid in self.fs.pids() if self.pids is None else self.pids:
                tables.setdefault(self.fs.link(pid, "ns/net"), self.fs.path(pid, "net/unix"))
            for path in tables.values():
                try:
                    with open(path, "rb") as handle:
                        lines = handle.read().split(b"\n")
                except OSError:
                    continue
                for line in lines:
                    words = line.split(None, 7)
                    if len(words) == 8:
                        self._bound.add(os.path.basename(words[7]).decode("utf-8", "surrogateescape"))
        return self._bound

    def look(self, candidates: t.Collection[_Candidate]) -> ScanResult:
        keys = frozenset(candidate.key for candidate in candidates if candidate.key is not None)
        uids = self.options.uids
        return scan(self.fs, Watch(keys=keys, private=True), self.pids, None if uids is None else set(uids))

    def blind(self, folder: _Folder, seen: ScanResult) -> str:
        """Why a scan proves nothing for a folder; empty when it does."""
        if folder.system and self.options.uids is not None:
            return "users confines the look, and everybody uses " + folder.path
        if seen.unreadable and (folder.system or not self.options.simulated):
            first = seen.unreadable[0]
            return "%d processes may not be looked at, first %d (%s)" % (
                len(seen.unreadable),
                first.pid,
                show(first.comm),
            )
        return ""

    def unused(self, candidates: list[_Candidate]) -> list[_Candidate]:
        """Those that no process in sight has open or mapped. Without a complete look, none."""
        if not candidates:
            return []
        seen = self.look(candidates)
        self.result.unreadable = [
            {"pid": entry.pid, "comm": show(entry.comm), "why": entry.why} for entry in seen.unreadable
        ]
        users: dict[Key, list[str]] = {}
        for found in seen.found.values():
            for key in found.keys:
                users.setdefault(key, []).append("%d (%s)" % (found.process.pid, show(found.process.comm)))
        free = []
        for candidate in candidates:
            blind = self.blind(candidate.folder, seen)
            holders = users.get(candidate.key) if candidate.key is not None else None
            if holders:
                self.keep(candidate, *self.in_use(candidate, "by process " + ", ".join(holders[:5])))
            elif blind:
                self.result.complete = False
                self.keep(candidate, "scan_incomplete", blind)
            else:
                free.append(candidate)
        return free

    def in_use(self, candidate: _Candidate, detail: str) -> tuple[str, str]:
        """A lock is worth naming."""
        if candidate.kind.type != SOCKET:
            with contextlib.suppress(OSError), self.opened(candidate) as fd:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return "locked", detail
        return "in_use", detail

    # -- removing -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def opened(self, candidate: _Candidate) -> t.Iterator[int]:
        """The judged file itself, opened. Raises OSError when the name leads elsewhere by now."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        fd = os.open(candidate.name, flags, dir_fd=candidate.folder.fd)
        try:
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) != (candidate.status.st_dev, candidate.status.st_ino):
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            yield fd
        finally:
            os.close(fd)

    def remove(self, candidate: _Candidate, check: bool) -> None:
        """Prove once more that nobody uses it, and unlink it in the same breath."""
        try:
            if candidate.kind.type == SOCKET:
                why = self.socket_reason(candidate)
                if why is not None:
                    self.keep(candidate, *why)
                    return
                self.unlink(candidate, check)
                return
            with self.opened(candidate) as fd:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self.keep(candidate, "locked", "somebody out of sight holds a lock on it")
                    return
                with _sole_opener(fd) as sole:
                    if not sole():
                        self.keep(candidate, "in_use", "somebody out of sight has it open or mapped")
                        return
                    self.unlink(candidate, check)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return
            self.keep(candidate, "not_removed", os.strerror(error.errno or 0))

    def unlink(self, candidate: _Candidate, check: bool) -> None:
        if not candidate.unchanged():
            self.keep(candidate, "changed", "another file has this name now")
            return
        if not check:
            os.unlink(candidate.name, dir_fd=candidate.folder.fd)
        self.result.removed.append(candidate.row())
        self.result.freed += candidate.size

    def socket_reason(self, candidate: _Candidate) -> tuple[str, str] | None:
        """Why a socket is not stale; None when it is: nobody has it bound, and nobody answers."""
        self._bound = None
        if candidate.name in self.bound:
            return "in_use", "a process has it bound"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as probe:
            try:
                probe.connect("/proc/self/fd/%d/%s" % (candidate.folder.fd, candidate.name))
            except ConnectionRefusedError:
                return None
            except OSError as error:
                return "in_use", "connecting to it: " + os.strerror(error.errno or 0)
        return "in_use", "a process listens on it"

    def run(self, check: bool) -> Swept:
        try:
            self.open_folders()
            free = self.unused(self.candidates())
            # A server may have started since the first look.
            for candidate in free if check else self.unused(free):
                self.remove(candidate, check)
        finally:
            self.close()
        self.result.kept.sort(key=lambda kept: kept["path"])
        if not self.result.complete:
            self.result.warnings.append(
                "Not every process could be looked at, so files that may be in use stay. Run with become: true and "
                "without users."
            )
        return self.result


@contextlib.contextmanager
def _sole_opener(fd: int) -> t.Iterator[t.Callable[[], bool]]:
    """Ask the kernel whether this descriptor is the file's only one, mappings included, in all namespaces.

    A write lease is granted only then (fcntl(2), F_SETLEASE), and whoever opens the file meanwhile waits for us. Where
    leases are not supported or not permitted there is no answer, and the scan of /proc stands alone.
    """
    # The kernel tells about a waiting opener by SIGIO, which would end us.
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    leased = False
    try:
        busy = False
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            leased = True
        except OSError as error:
            busy = error.errno in (errno.EAGAIN, errno.EBUSY)
        yield lambda: not busy and (not leased or fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_WRLCK)
    finally:
        if leased:
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        signal.signal(signal.SIGIO, before)


def sweep(
    options: SweepOptions,
    check: bool = False,
    fs: ProcFS | None = None,
    pids: t.Iterable[int] | None = None,
    now: float | None = None,
) -> Swept:
    """Remove residue; with C(check) only say what would go.

    C(pids) confines the look to these processes (for tests). Raises CleanslateError when a folder cannot be trusted.
    """
    return _Sweeper(options.check(), fs or ProcFS(), pids, time.time() if now is None else now).run(check)
