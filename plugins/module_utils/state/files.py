# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Files that are either the old or the new whole, locks that die with their holder, folders that nobody else can
tamper with."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import stat
import tempfile
import typing as t

from ..common.clock import Clock, Deadline
from ..common.errors import CleanslateError
from ..common.text import show


class Locked(Exception):
    """Another process holds the lock."""


def _why(error: OSError) -> str:
    return os.strerror(error.errno or 0)


def _user(uid: int) -> str:
    try:
        return "%s (uid %d)" % (show(pwd.getpwuid(uid).pw_name), uid)
    except KeyError:
        return "uid %d" % uid


def _is_trusted(uid: int) -> bool:
    """What root or this user has made is as good as what this process makes."""
    return uid in (0, os.geteuid())


def make_dir(path: str, mode: int = 0o755) -> None:
    """Create a folder and those above it; only the last one, and only if created here, gets C(mode).

    Raises CleanslateError when that is impossible.
    """
    path = path.rstrip("/") or "/"
    if os.path.isdir(path):
        return
    make_dir(os.path.dirname(path) or ".", 0o755)
    try:
        os.mkdir(path, mode)
        os.chmod(path, mode)
    except OSError as error:
        if not (error.errno == errno.EEXIST and os.path.isdir(path)):
            raise CleanslateError("%s cannot be created: %s." % (show(path), _why(error))) from None


def check_dir(path: str, option: str) -> bool:
    """Refuse a folder whose content others could change, for what lies in it decides which processes are ended.

    It must belong to root or to this user, be no one else's symlink, and be writable by others only with the sticky
    bit; as root this goes for the group too. Returns whether the folder is there. Raises CleanslateError that names
    C(option) and what to do.
    """
    if not os.path.isabs(path):
        raise CleanslateError("%s: %s is no absolute path." % (option, show(path)))
    place = "%s: %s" % (option, show(path))
    try:
        link = os.lstat(path.rstrip("/") or "/")
    except FileNotFoundError:
        return False
    except OSError as error:
        raise CleanslateError("%s cannot be looked at: %s." % (place, _why(error))) from None
    if stat.S_ISLNK(link.st_mode) and not _is_trusted(link.st_uid):
        raise CleanslateError(
            "%s is a symlink of user %s, who could lead this anywhere. Remove it." % (place, _user(link.st_uid))
        )
    try:
        status = os.stat(path)
    except OSError as error:
        raise CleanslateError("%s cannot be looked at: %s." % (place, _why(error))) from None
    if not stat.S_ISDIR(status.st_mode):
        raise CleanslateError("%s is no folder. Remove it, or choose another path." % place)
    if not _is_trusted(status.st_uid):
        raise CleanslateError(
            "%s belongs to user %s, who could change what is trusted here. Choose another folder, or run "
            "`chown -R %d %s` if you know its content." % (place, _user(status.st_uid), os.geteuid(), show(path))
        )
    others = 0o022 if os.geteuid() == 0 else 0o002
    if status.st_mode & others and not status.st_mode & stat.S_ISVTX:
        raise CleanslateError(
            "%s may be written by other users (mode %04o), who could change what is trusted here. Run `chmod go-w %s`."
            % (place, stat.S_IMODE(status.st_mode), show(path))
        )
    return True


def ensure_dir(path: str, option: str, mode: int = 0o755) -> None:
    """Create the folder if it is not there, and refuse it as check_dir does."""
    if not check_dir(path, option):
        try:
            make_dir(path, mode)
        except CleanslateError as error:
            raise CleanslateError("%s: %s" % (option, error.message)) from None
        check_dir(path, option)


def _open_plain(path: str, flags: int, trusted: bool, mode: int = 0o600) -> int:
    """Open a plain file, and nothing that stands in its place: never waits for a pipe's other end.

    With C(trusted) no symlink is followed and the file must belong to root or this user. Raises OSError and
    CleanslateError.
    """
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (os.O_NOFOLLOW if trusted else 0)
    try:
        fd = os.open(path, flags, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and trusted:
            raise CleanslateError("%s is a symlink and none of ours. Remove it." % show(path)) from None
        raise
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise CleanslateError("%s is no plain file. Remove it." % show(path))
    if trusted and not _is_trusted(status.st_uid):
        os.close(fd)
        raise CleanslateError("%s belongs to user %s. Remove it." % (show(path), _user(status.st_uid)))
    return fd


def read_bytes(path: str, trusted: bool = False) -> bytes | None:
    """The content, None when there is no such file. Raises CleanslateError when there is one that cannot be read.

    C(trusted): follow no symlink, and refuse a file of another user than root and this one.
    """
    try:
        with os.fdopen(_open_plain(path, os.O_RDONLY, trusted), "rb") as handle:
            return handle.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CleanslateError("%s cannot be read: %s." % (show(path), _why(error))) from None


def _is_same(path: str, content: bytes, mode: int, uid: int, gid: int) -> bool:
    """Whether the file is already what write_atomic would make it: also whose it is."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    if not stat.S_ISREG(status.st_mode) or stat.S_IMODE(status.st_mode) != mode or status.st_size != len(content):
        return False
    if status.st_uid != (os.geteuid() if uid == -1 else uid) or gid not in (-1, status.st_gid):
        return False
    try:
        return read_bytes(path) == content
    except CleanslateError:
        return False


def write_atomic(path: str, content: bytes, mode: int, uid: int = -1, gid: int = -1) -> bool:
    """Make C(path) hold C(content) with C(mode) and owner; returns whether anything changed.

    A reader sees the old or the new file, never a half one; a full disk leaves the old one. What stands at C(path) is
    replaced, never written into: a symlink or hard link that somebody planted leads nowhere.
    """
    if _is_same(path, content, mode, uid, gid):
        return False
    folder = os.path.dirname(path) or "."
    temporary = ""
    try:
        fd, temporary = tempfile.mkstemp(prefix=".cleanslate-", dir=folder)
        with os.fdopen(fd, "wb") as handle:
            handle.write(content)
            handle.flush()
            if (uid, gid) != (-1, -1):
                os.fchown(handle.fileno(), uid, gid)
            os.fchmod(handle.fileno(), mode)
            os.fsync(handle.fileno())
        os.rename(temporary, path)
    except BaseException as error:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        if isinstance(error, OSError):
            raise CleanslateError("%s cannot be written: %s." % (show(path), _why(error))) from None
        raise
    _sync_dir(folder)
    return True


def _sync_dir(folder: str) -> None:
    """Make a rename outlive a power cut, where the file system can."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def remove(path: str) -> bool:
    """Remove a file (a symlink itself, never what it leads to); returns whether it was there."""
    try:
        os.unlink(path)
        return True
    except FileNotFoundError:
        return False
    except OSError as error:
        raise CleanslateError("%s cannot be removed: %s." % (show(path), _why(error))) from None


def _try_lock(path: str) -> int | None:
    """A descriptor that holds the lock, None when another one does."""
    while True:
        fd = _open_plain(path, os.O_RDWR | os.O_CREAT, trusted=True)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Somebody may have removed the file meanwhile: then the next one locks another file.
            mine, there = os.fstat(fd), os.lstat(path)
            if (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino):
                return fd
        except FileNotFoundError:
            pass
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                os.close(fd)
                return None
            os.close(fd)
            raise
        os.close(fd)


@contextlib.contextmanager
def locked(path: str, timeout: float = 0.0, clock: Clock | None = None) -> t.Iterator[None]:
    """Hold an exclusive flock on C(path) (created 0600). Raises Locked after C(timeout) seconds, CleanslateError when
    it can never be had.

    The kernel drops it when the process ends, however it ends; a program that is started meanwhile does not inherit it.
    """
    deadline = Deadline(clock or Clock(), timeout)
    try:
        fd = _try_lock(path)
        while fd is None:
            if deadline.over:
                raise Locked(path)
            deadline.clock.pause(min(0.1, deadline.left))
            fd = _try_lock(path)
    except OSError as error:
        raise CleanslateError("%s cannot be locked: %s." % (show(path), _why(error))) from None
    try:
        yield
    finally:
        # Explicitly: a forked child may still have the descriptor.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)
