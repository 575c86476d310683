# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Waiting for a launched server, one window at a time, and knowing at once when it will never come.

Ready means all of it: the instance's own process listens on the declared port (SGLang's log says "ready to roll" even
when its warm-up reached another server's port), as many workers as declared, and a real generation comes back.
"""

from __future__ import annotations

import time
import typing as t

from ..common.clock import Deadline
from ..common.text import show
from ..proc.identity import Kernel
from ..state.record import RecordStore
from .http import answered
from .logs import FATAL_WHILE_ALIVE, Diagnosis, diagnose, progress
from .roles import role_of, schedulers
from .runtime import Runtime

#: Seconds between two looks at port, processes and log, at first and at most: they grow while there is no news, for
#: each look at a journal is a process. The end of the server interrupts.
LOOK, LOOK_MOST = 0.25, 2.0
#: Seconds that the supervisor may take to write down how the server ended.
LAST_WORDS = 2.0


def wait(runtime: Runtime, window: float, cursor: dict[str, t.Any], kernel: Kernel | None = None) -> dict[str, t.Any]:
    """Watch for at most C(window) seconds.

    Returns C(state) (waiting, ready, failed), C(events) (new lines for people), C(cursor) for the next call and
    C(elapsed) since the launch; when failed, C(diagnosis).
    """
    kernel = kernel or Kernel(runtime.fs)
    deadline = Deadline(runtime.clock, window)
    cursor = dict(cursor)
    told: dict[str, t.Any] = dict(cursor.get("progress") or {})
    position: dict[str, t.Any] = dict(cursor.get("log") or {})
    events: list[str] = []
    log = runtime.log()
    secrets = list(runtime.keys().values())

    def elapsed() -> float:
        age = since_launch(runtime)
        return deadline.elapsed if age is None else age

    def tell(text: str) -> None:
        events.append("%6.1f s  %s" % (elapsed(), text))

    def answer(state: str, **more: t.Any) -> dict[str, t.Any]:
        return {
            "state": state,
            "ready": state == "ready",
            "events": events,
            "cursor": {"log": position, "progress": told},
            "elapsed": round(elapsed(), 1),
            "phase": told.get("phase", "start"),
            **more,
        }

    def failed(found: Diagnosis) -> dict[str, t.Any]:
        return answer("failed", diagnosis={"cause": found.cause, "msg": found.msg, "lines": found.lines})

    pause = LOOK
    while True:
        news = len(events)
        lines, position = log.read(position)
        for text in progress(lines, told):
            tell(text)
        dying = any(FATAL_WHILE_ALIVE.search(line) for line in lines)
        with_handle = kernel.open(runtime.main) if runtime.main_alive() else None
        if with_handle is None:
            return failed(_last_words(runtime, secrets))
        with with_handle as handle:
            # Whose port it is takes a look at every process; that nobody listens yet, does not.
            own = runtime.members() if runtime.port(()).listeners else []
            if own and runtime.listens(own):
                workers = schedulers(own)
                if "listening" not in told.setdefault("told", []):
                    told["told"].append("listening")
                    tell("port %d is its own; asking for a generation" % runtime.record.port)
                if len(workers) == runtime.schedulers:
                    question = runtime.question()
                    limit = max(1.0, deadline.left)
                    reply = runtime.client().post(question.path, question.body, limit)
                    if answered(reply):
                        tell("a generation came back from %d worker%s" % (len(workers), "s"[len(workers) == 1 :]))
                        return answer("ready", workers=len(workers))
                    if reply.status in (401, 403):
                        return failed(
                            Diagnosis("key", "The server refuses the declared key (HTTP %d)." % reply.status, [])
                        )
                    told["last_reply"] = "HTTP %d" % reply.status if reply.status else reply.error
                else:
                    told["last_reply"] = "%d of %d workers run" % (len(workers), runtime.schedulers)
            elif dying:
                return failed(diagnose(log.tail(), None, secrets))
            if deadline.over:
                return answer("waiting", last=show(str(told.get("last_reply", ""))))
            if len(events) > news:
                pause = LOOK
            kernel.wait([handle], min(pause, deadline.left))
            pause = min(pause * 1.5, LOOK_MOST)


def since_launch(runtime: Runtime) -> float | None:
    """Seconds since the instance was launched, suspended ones included; None when its record does not say."""
    started = float(runtime.details.get("launched_boottime", 0.0))
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started) if started else None


def still_loads(runtime: Runtime, limit: float) -> str:
    """What to say of a server that lives and does not listen, within the time that it may take to become ready; empty
    when that is over, or its log says that it never will be."""
    age = since_launch(runtime)
    if age is None or age >= limit or any(FATAL_WHILE_ALIVE.search(line) for line in runtime.log().tail()):
        return ""
    return "it was launched %.0f s ago and still loads (it has %.0f s to become ready)" % (age, limit)


def _last_words(runtime: Runtime, secrets: t.Sequence[str]) -> Diagnosis:
    """The main process is gone: its exit code (written down just after its end) and its last lines."""
    patience = Deadline(runtime.clock, LAST_WORDS)
    ending = runtime.ending()
    while ending.code is None and not patience.over:
        runtime.clock.pause(0.05)
        ending = runtime.ending()
    lines = runtime.log().tail()
    if not lines and ending.code is None:
        return Diagnosis("gone", "The server is not running, and nobody saw how it ended.", [])
    return diagnose(lines, ending.code, secrets)


def remember(runtime: Runtime, state_dir: str) -> None:
    """Note in the record that the instance became ready, and with which processes."""
    own = runtime.members()
    runtime.record.ready_at = time.time()
    runtime.record.details["last_ready"] = runtime.details.get("declaration")
    runtime.record.details["workers"] = [
        {"pid": p.pid, "start_time": p.start_time, "role": role_of(p, runtime.record.pid, runtime.supervisor).label}
        for p in own
        if role_of(p, runtime.record.pid, runtime.supervisor).kind in ("main", "scheduler", "detokenizer")
    ]
    RecordStore(state_dir).save(runtime.record)
