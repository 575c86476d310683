# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One trial, in a PID namespace of its own: set the state up, let one tool work on it, look at what became of all.

enter.py ORDER is the namespace's first process: it starts the trial under a name that no tool looks for, and reaps
whatever is left to it. ORDER is a JSON file; the result is written beside it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import methods, states
from .states import Actor, State

#: The interpreter itself, whatever it is called: under a title in place of its name Python does not find itself.
PYTHON = os.environ.get("GPU_TEST_PYTHON") or os.path.realpath(sys.executable)
HOLDER = Path(__file__).with_name("holder.py")
ENTRY = str(Path(__file__).with_name("enter.py"))
READY = 90.0


class Failed(Exception):
    """The state could not be set up."""


class Watched:
    """A process whose end is noticed when it happens."""

    def __init__(self, label: str, pid: int) -> None:
        self.label = label
        self.pid = pid
        self.fd = os.pidfd_open(pid)
        #: Monotonic time of its end: of the last of its threads, reaped or not.
        self.ended: float | None = None

    def kill(self) -> None:
        signal.pidfd_send_signal(self.fd, signal.SIGKILL)


class Cast:
    """The processes of a trial."""

    def __init__(self, folder: Path, simulate: bool) -> None:
        self.folder = folder
        self.simulate = simulate
        self.started: list[subprocess.Popen[str]] = []
        self.watched: list[Watched] = []
        self._poll = select.epoll()
        threading.Thread(target=self._notice, daemon=True).start()

    def _notice(self) -> None:
        while True:
            for fd, _event in self._poll.poll():
                now = time.monotonic()
                self._poll.unregister(fd)
                for watched in self.watched:
                    if watched.fd == fd:
                        watched.ended = now

    def watch(self, label: str, pid: int) -> Watched:
        watched = Watched(label, pid)
        self.watched.append(watched)
        self._poll.register(watched.fd, select.EPOLLIN)
        return watched

    def script(self, name: str, source: Path | None = None) -> str:
        """A script of this name: the holder, or one that waits for ever."""
        path = self.folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source.read_text() if source else "import signal\nwhile True:\n    signal.pause()\n")
        return str(path)

    def popen(self, words: list[str], executable: str, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            words,
            executable=executable,
            env={**os.environ, "PYTHONHOME": sys.base_prefix, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def start(self, actor: Actor) -> subprocess.Popen[str]:
        """Start a holder; it speaks when it holds."""
        # Where GPUs are hidden the others are counted from 0; the stand-in nodes keep their numbers.
        device = 0 if actor.visible is not None and not self.simulate else actor.gpu
        wanted = {"device": device, "mib": actor.mib, "behaviour": actor.behaviour, "name": actor.title}
        wanted["nodes"] = actor.nodes
        environment = {"GPU_TEST_HOLDER": json.dumps(wanted), "FAKE_GPU_MIB": str(actor.mib)}
        if not actor.mib:
            environment["FAKE_GPU_LISTED"] = "0"
        if actor.visible is not None:
            environment["CUDA_VISIBLE_DEVICES"] = actor.visible
        script = self.script(actor.script, HOLDER)
        if actor.title:
            return self.popen([actor.title, script], PYTHON, environment)
        if actor.namespace:
            command = own_namespace()
            return self.popen([*command, PYTHON, script], command[0], environment)
        return self.popen(["python3", script], PYTHON, environment)

    @staticmethod
    def answer(process: subprocess.Popen[str], what: str) -> dict[str, Any]:
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], READY)
        line = process.stdout.readline() if readable else ""
        if not line:
            raise Failed("%s did not take its memory%s" % (what, "" if readable else " within %g s" % READY))
        return json.loads(line)

    def enter(self, actor: Actor, process: subprocess.Popen[str]) -> None:
        """Wait until it holds, and watch who does."""
        told = self.answer(process, actor.label)
        pid = process.pid
        if actor.namespace:
            pid = child_of(process.pid)
        if actor.behaviour == "heir":
            pid = told["child"]
            if self.simulate:
                # The driver goes on listing whoever opened the GPU.
                Path(os.environ["FAKE_NVML_CONF"]).write_text("DEAD_OWNER=%d@%d\n" % (process.pid, actor.gpu))
            process.kill()
            process.wait()
        if actor.behaviour == "leaderless":
            wait_for(lambda: state_of(pid) == "Z", "the main thread of %s to end" % actor.label)
        self.watch(actor.label, pid)

    def bystanders(self) -> None:
        """Two processes that have nothing to do with GPUs: a module of somebody's play, and a reader of a log."""
        play = self.script("ansible-tmp-1/AnsiballZ_command.py")
        log = self.folder / "sglang.launch_server.log"
        log.touch()
        for label, words, executable in (
            ("a module of another play", ["python3", play], PYTHON),
            ("a reader of the server's log", ["tail", "-f", str(log)], "/usr/bin/env"),
        ):
            process = self.popen(words if executable == PYTHON else ["env", *words], executable, {})
            self.watch(label, process.pid)

    def settle(self) -> None:
        """Exits that have happened are known after this."""
        for watched in self.watched:
            if watched.ended is None and select.select([watched.fd], [], [], 0)[0]:
                wait_for(lambda watched=watched: watched.ended is not None, "the end of %s" % watched.label)


def own_namespace() -> list[str]:
    """The command that starts something in a PID namespace of its own."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "lab"))
    from embedded import space

    command = space.unshare()
    if command is None:
        raise Failed("no PID namespace can be made here")
    return ["/usr/bin/env", *command]


def child_of(pid: int) -> int:
    """The pid of an only child, through env and unshare."""
    children = Path("/proc/%d/task/%d/children" % (pid, pid)).read_text().split()
    if len(children) != 1:
        raise Failed("process %d has %d children" % (pid, len(children)))
    return int(children[0])


def state_of(pid: int) -> str:
    try:
        return Path("/proc/%d/stat" % pid).read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return ""


def wait_for(condition: Any, what: str, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise Failed("waited in vain for %s" % what)
        time.sleep(0.002)


def play(order: Mapping[str, Any]) -> dict[str, Any]:
    """The whole trial; returns its result."""
    state: State = next(state for state in states.STATES if state.name == order["state"])
    folder = Path(order["folder"])
    cast = Cast(folder, order["simulate"])
    inside = [actor for actor in state.actors if not actor.outside]
    cast.bystanders()
    begun = [(actor, cast.start(actor)) for actor in inside]
    for actor, process in begun:
        cast.enter(actor, process)
    # Nobody of them may be missing before the tool begins.
    cast.settle()
    lost = [watched.label for watched in cast.watched if watched.ended is not None]
    if lost:
        raise Failed("%s ended before the tool began" % ", ".join(lost))
    may_end = {actor.label for actor in inside if not actor.spared}
    started = time.monotonic()
    done = methods.run(order["method"], state, order)
    finished = time.monotonic()
    cast.settle()
    ended = {watched.label: watched.ended for watched in cast.watched}
    # The observer outside looks at the memory of this moment: all must stand as it is until it has.
    time.sleep(order["linger"])
    return {
        **done,
        "state": state.name,
        "method": order["method"],
        "started": started,
        "finished": finished,
        "processes": [
            {
                "label": watched.label,
                "pid": watched.pid,
                "may_end": watched.label in may_end,
                "ended": ended[watched.label],
            }
            for watched in cast.watched
        ],
    }


def main() -> int:
    order_file = Path(sys.argv[1])
    order = json.loads(order_file.read_text())
    if os.getpid() == 1:
        child = os.posix_spawn(
            PYTHON,
            ["gpu-trial", ENTRY, str(order_file)],
            {**os.environ, "PYTHONHOME": sys.base_prefix, "GPU_TEST_PYTHON": PYTHON},
        )
        while True:
            pid, status = os.wait()
            if pid == child:
                return os.waitstatus_to_exitcode(status) & 0xFF
    os.environ.pop("PYTHONHOME", None)
    result = order_file.with_name("result.json")
    from . import waiting

    try:
        done = waiting.play(order) if order["method"] == "watch" else play(order)
    except Failed as error:
        done = {"failed": str(error)}
    result.write_text(json.dumps(done))
    return 0
