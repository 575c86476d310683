# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""A program that is run to its end, with bounds on its time and on what it may say.

It gets a session and so a process group of its own: what C(pct exec) starts in a container is in it too, and ends with
it when time is up (lxc-attach alone would leave it running).
"""

from __future__ import annotations

import dataclasses
import os
import selectors
import signal
import subprocess
import typing as t

from ..common.clock import Clock, Deadline

#: Bytes of each stream that are kept: a container must not fill the hypervisor's memory.
LIMIT = 4 << 20
_GRACE = 5.0
#: Nothing of the hypervisor's own environment goes into a container.
ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}


@dataclasses.dataclass(frozen=True)
class Ended:
    #: Negative when a signal ended it, as in subprocess.
    returncode: int
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False
    #: Whether it said more than was kept.
    cut: bool = False

    @property
    def text(self) -> str:
        """All that it said, for a message."""
        return (self.stderr + b"\n" + self.stdout).decode("utf-8", "replace").strip()


class _Kept:
    """The first half and the last half of the limit."""

    def __init__(self, limit: int) -> None:
        self.half = limit // 2
        self.head = bytearray()
        self.tail = bytearray()
        self.cut = False

    def add(self, data: bytes) -> None:
        room = self.half - len(self.head)
        self.head += data[: max(0, room)]
        self.tail += data[max(0, room) :]
        if len(self.tail) > self.half:
            self.cut = True
            del self.tail[: len(self.tail) - self.half]

    def value(self) -> bytes:
        return bytes(self.head + (b"\n[...]\n" if self.cut else b"") + self.tail)


def run(
    argv: t.Sequence[str], stdin: bytes = b"", timeout: float = 600.0, clock: Clock | None = None, limit: int = LIMIT
) -> Ended:
    """Run C(argv); C(timeout) in seconds, after which it and all it started are ended by TERM and KILL.

    Its stdin is a pipe, never closed and never a file: C(pct) breaks itself without one, and lxc-attach changes the
    mode of a file. A process that it leaves behind with its stdout is not waited for. Raises OSError when it cannot be
    started.
    """
    clock = clock or Clock()
    process = subprocess.Popen(  # pylint: disable=ansible-bad-function
        list(argv),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(ENVIRONMENT),
        start_new_session=True,
    )
    kept = {"stdout": _Kept(limit), "stderr": _Kept(limit)}
    try:
        timed_out = _converse(process, stdin, kept, Deadline(clock, timeout))
    except BaseException:
        _signal(process, signal.SIGKILL)
        process.wait()
        raise
    finally:
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None and not stream.closed:
                _close(stream)
    return Ended(
        process.wait(),
        kept["stdout"].value(),
        kept["stderr"].value(),
        timed_out,
        kept["stdout"].cut or kept["stderr"].cut,
    )


def _close(stream: t.IO[bytes]) -> None:
    try:
        stream.close()
    except BrokenPipeError:
        pass  # it ended without reading all of its input


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    """To its whole process group; it is not reaped yet, so the number is still its own."""
    if process.returncode is None:
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            pass


def _converse(process: subprocess.Popen[bytes], stdin: bytes, kept: t.Mapping[str, _Kept], deadline: Deadline) -> bool:
    """Feed and read until it has ended; whether its time was up."""
    feed, out, err = (t.cast("t.IO[bytes]", stream) for stream in (process.stdin, process.stdout, process.stderr))
    ended = os.pidfd_open(process.pid)
    timed_out, killed = False, False
    view = memoryview(stdin)
    try:
        with selectors.DefaultSelector() as selector:
            for stream in (feed, out, err):
                os.set_blocking(stream.fileno(), False)
            selector.register(ended, selectors.EVENT_READ, "ended")
            selector.register(out, selectors.EVENT_READ, "stdout")
            selector.register(err, selectors.EVENT_READ, "stderr")
            selector.register(feed, selectors.EVENT_WRITE, "stdin")
            over = False
            while not over:
                events = selector.select(deadline.left)
                if deadline.over:
                    _signal(process, signal.SIGKILL if timed_out else signal.SIGTERM)
                    killed, timed_out = timed_out, True
                    deadline = Deadline(deadline.clock, _GRACE)
                    if killed:
                        break
                for key, _mask in events:
                    if key.data == "ended":
                        over = True
                    elif key.data == "stdin":
                        view = _feed(feed, view, selector)
                    elif not _take(key.fd, kept[key.data]):
                        selector.unregister(key.fileobj)
            for name, stream in (("stdout", out), ("stderr", err)):
                # What it wrote before its end is in the pipe; what others write later is not its own.
                for _chunk in range(1 + LIMIT // 65536):
                    if not _take(stream.fileno(), kept[name], final=True):
                        break
    finally:
        os.close(ended)
    return timed_out


def _feed(stream: t.IO[bytes], view: memoryview, selector: selectors.BaseSelector) -> memoryview:
    try:
        if len(view):
            view = view[os.write(stream.fileno(), view[:65536]) :]
    except BlockingIOError:
        return view
    except BrokenPipeError:
        view = view[:0]
    if not len(view):
        selector.unregister(stream)
        _close(stream)
    return view


def _take(fd: int, kept: _Kept, final: bool = False) -> bool:
    """Read a chunk; False at its end, or with C(final) when nothing is there."""
    try:
        data = os.read(fd, 65536)
    except BlockingIOError:
        return not final
    kept.add(data)
    return bool(data)
