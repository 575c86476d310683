# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Start and stop the demo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from . import node, space, story

PID_FILE = node.ROOT / "build" / "demo.pid"
INSIDE = "CLEANSLATE_DEMO_INSIDE"


def main(arguments: list[str]) -> int:
    if arguments == ["--stop"]:
        return stop()
    if arguments == ["--inside"]:
        return space.init(story.tell, int(os.environ[INSIDE]), keep=keeping())
    if arguments:
        return space.fail(f"usage: {Path(sys.argv[0]).name} [--stop]")
    if running():
        stop()
    # Asked to end, it ends what it started first.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    command = space.unshare()
    return outside(command) if command else adopted()


def keeping() -> bool:
    return os.environ.get("KEEP", "") not in ("", "0")


def outside(command: list[str]) -> int:
    """Run the story in a PID namespace, wait for its end, and leave the namespace alone only with KEEP=1."""
    reading, writing = os.pipe()
    environment = dict(os.environ, **{INSIDE: str(writing)})
    process = subprocess.Popen(
        [*command, sys.executable, str(node.ROOT / "tests/lab/demo"), "--inside"],
        env=environment,
        pass_fds=[writing],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(writing)
    PID_FILE.parent.mkdir(exist_ok=True)
    PID_FILE.write_text(f"{process.pid} {start_time(process.pid)}\n")
    code = b""
    try:
        code = os.read(reading, 1)
    finally:
        if not (keeping() and code == b"\0"):
            process.kill()
            process.wait()
            PID_FILE.unlink(missing_ok=True)
    return code[0] if code else 1


def adopted() -> int:
    """Without a namespace: everything that the story starts stays below this process, and is ended by it."""
    print("(This kernel gives no PID namespace to this user: the demo runs among your other processes.)")
    if keeping():
        return space.fail("KEEP=1 needs a PID namespace, so that everything can be stopped again by one command.")
    space.become_subreaper()
    try:
        return story.tell()
    finally:
        space.end_children()


def start_time(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()[19].decode()
    except OSError:
        return ""


def running() -> int | None:
    """The pid of a demo that was kept, None when there is none."""
    try:
        pid, started = PID_FILE.read_text().split()
    except (OSError, ValueError):
        return None
    return int(pid) if start_time(int(pid)) == started else None


def stop() -> int:
    pid = running()
    if pid is None:
        print("No demo is running.")
    else:
        os.kill(pid, signal.SIGKILL)
        print("The demo's processes were stopped.")
    PID_FILE.unlink(missing_ok=True)
    return 0
