# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Files that are either the old or the new whole, and locks that die with their holder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
import typing as t

from ..common.clock import Clock, Deadline
from ..common.errors import CleanslateError


class Locked(Exception):
    """Another process holds the lock."""


def make_dir(path: str, mode: int = 0o755) -> None:
    """Create a folder and those above it; only folders created here get C(mode)."""
    if os.path.isdir(path):
        return
    make_dir(os.path.dirname(path) or ".", 0o755)
    try:
        os.mkdir(path, mode)
        os.chmod(path, mode)
    except FileExistsError:
        pass
    except OSError as error:
        raise CleanslateError("%s cannot be created: %s." % (path, os.strerror(error.errno or 0))) from None


def read_bytes(path: str) -> bytes | None:
    """The content, None when there is no such file."""
    try:
        with open(path, "rb") as handle:
            return handle.read()
    except FileNotFoundError:
        return None


def write_atomic(path: str, content: bytes, mode: int, uid: int = -1, gid: int = -1) -> bool:
    """Make C(path) hold C(content) with C(mode) and owner; returns whether anything changed.

    A reader sees the old or the new file, never a half one; a full disk leaves the old one.
    """
    folder = os.path.dirname(path) or "."
    try:
        status = os.lstat(path)
        same_owner = uid in (-1, status.st_uid) and gid in (-1, status.st_gid)
        if same_owner and status.st_mode & 0o7777 == mode and read_bytes(path) == content:
            return False
    except FileNotFoundError:
        pass
    try:
        fd, temporary = tempfile.mkstemp(prefix=".cleanslate-", dir=folder)
    except OSError as error:
        raise CleanslateError("%s cannot be written: %s." % (path, os.strerror(error.errno or 0))) from None
    try:
        with os.fdopen(fd, "wb") as handle:
            handle.write(content)
            handle.flush()
            os.fchmod(handle.fileno(), mode)
            if (uid, gid) != (-1, -1):
                os.fchown(handle.fileno(), uid, gid)
            os.fsync(handle.fileno())
        os.rename(temporary, path)
    except OSError as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise CleanslateError("%s cannot be written: %s." % (path, os.strerror(error.errno or 0))) from None
    return True


def remove(path: str) -> bool:
    """Remove a file; returns whether it was there."""
    try:
        os.unlink(path)
        return True
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def locked(path: str, timeout: float = 0.0, clock: Clock | None = None) -> t.Iterator[None]:
    """Hold an exclusive flock on C(path) (created 0600). Raises Locked after C(timeout) seconds.

    The kernel drops it when the process ends, however it ends; the descriptor is not inherited.
    """
    deadline = Deadline(clock or Clock(), timeout)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                if deadline.over:
                    raise Locked(path) from None
                deadline.clock.pause(min(0.1, deadline.left))
        yield
    finally:
        os.close(fd)
