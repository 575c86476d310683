# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Why a process does not end, as far as the kernel tells, and what to do about it."""

from __future__ import annotations

import typing as t

from ..common.text import show
from ..proc.identity import Identity
from ..proc.table import Process, ProcFS, Vanished


class Diagnosis(t.NamedTuple):
    #: State letter of the main thread as in proc_pid_stat(5), for a dead main thread that of one which lives.
    state: str
    #: Kernel function that it waits in, empty when the kernel does not say.
    wchan: str
    #: Kernel stack, readable for root only.
    stack: str
    advice: str


def _read(fs: ProcFS, pid: int, name: str) -> str:
    raw = fs.read(pid, name) or b""
    return raw.decode("utf-8", "surrogateescape").strip()


def _advice(process: Process, wchan: str) -> str:
    if process.state == "t":
        return "A debugger holds it: end the debugger (TracerPid in /proc/%d/status)." % process.pid
    if "refrigerator" in wchan or "freez" in wchan:
        return "Its cgroup is frozen (a paused container): thaw it, and it ends."
    if process.state in ("D", "R") or wchan.startswith(("uvm_", "nv_", "os_", "rm_")):
        return (
            "It is inside the kernel or driver and nothing in user space ends it: drain and reboot the machine (in a "
            "container, its host)."
        )
    return "SIGKILL was sent again and again: if it stays, reboot the machine (in a container, its host)."


def diagnose(fs: ProcFS, identity: Identity) -> Diagnosis:
    """Look at a process that survived SIGKILL."""
    try:
        process = fs.process(identity.pid)
    except Vanished:
        return Diagnosis("", "", "", "It ended at the last moment: run again.")
    state, place = process.state, ""
    if state in ("Z", "X"):
        # The main thread has exited and another one hangs.
        for task in fs.tasks(identity.pid):
            text = _read(fs, identity.pid, "task/%d/stat" % task)
            letter = text[text.rfind(")") + 2 :][:1]
            if letter and letter not in "ZX":
                state, place = letter, "task/%d/" % task
                break
    wchan = _read(fs, identity.pid, place + "wchan")
    wchan = "" if wchan == "0" else wchan
    stack = _read(fs, identity.pid, place + "stack")
    return Diagnosis(
        state, show(wchan), "\n".join(show(line) for line in stack.split("\n"))[:2000], _advice(process, wchan)
    )
