# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Whether a running server does anything: a generation comes back, or tokens advance while it has to queue.

Busy is not broken. A server is called wedged only when, over the whole stall window inside one call, requests are
running and neither prefill nor decode advances, it is not paused, loading or compiling, and a generation fails.
Silence proves something only of a server that is known to speak: one without metrics and with log_level warning shows
nothing while it works. Everything in between is doubt.

Facts (sglang 0.5.17 to 0.5.23, metrics_reporter.py, tokenizer_manager.py): realtime_tokens_total counts while requests
run (older versions: once every decode_log_interval steps), prompt_tokens_total and generation_tokens_total only when
a request has ended.
"""

from __future__ import annotations

import re
import threading
import typing as t

from ..common.clock import Clock, Deadline
from .http import Client, Question, Reply, answered
from .logs import LogSource, activity, tells_of_decoding

SERVES, ADVANCES, WEDGED, DOUBT = "serves", "advances", "wedged", "doubt"
#: Seconds between two looks while a generation is on its way.
LOOK = 0.5
#: Seconds for a question that every healthy server answers at once.
QUICK = 2.0
#: Seconds that a server which refuses at once is given to change its mind.
REFUSED = 10.0
_COUNTERS = re.compile(
    r"^sglang:(?:prompt_tokens_total|generation_tokens_total|num_decode_steps_total|realtime_tokens_total)(?:\{[^}]*\})?\s+(\S+)",
    re.MULTILINE,
)
_DECODED = re.compile(r"^sglang:realtime_tokens_total\{[^}]*mode=\"decode\"[^}]*\}\s+(\S+)", re.MULTILINE)
_RUNNING = re.compile(r"^sglang:num_(?:running|queue)_reqs(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)
#: Bytes of the log in which a line about a batch is looked for.
_MEMORY = 4 * 1024 * 1024
#: Requests that run or wait, by the names that /v1/loads (since 0.5.8) and /get_load (before) give them.
_LOADS = ("num_running_reqs", "num_waiting_reqs", "num_reqs")


class Finding(t.NamedTuple):
    state: str
    why: str


class Sample(t.NamedTuple):
    """One look. None: this server does not say."""

    tokens: float | None
    running: int | None
    paused: bool
    #: Whether it counts tokens while requests run, and has done so.
    counts_live: bool = False


def sample(client: Client) -> Sample:
    """Counters and state from whatever endpoints this version has; none of them waits for the scheduler."""
    tokens: float | None = None
    running: int | None = None
    counts_live = False
    metrics = client.get("/metrics", QUICK)
    if metrics.ok and isinstance(metrics.body, str):
        values = [_number(value) for value in _COUNTERS.findall(metrics.body)]
        tokens = sum(values) if values else None
        counts_live = any(_number(value) > 0 for value in _DECODED.findall(metrics.body))
        gauges = [_number(value) for value in _RUNNING.findall(metrics.body)]
        running = int(sum(gauges)) if gauges else None
    if running is None:
        loads = client.first(["/v1/loads", "/get_load"], QUICK)
        running = _running(loads.body) if loads.ok else None
    ready = client.get("/ready", QUICK)
    # 404: the version has no /ready. 503: not up, or paused on purpose.
    return Sample(tokens, running, ready.status == 503, counts_live)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _running(body: t.Any) -> int | None:
    if isinstance(body, dict):
        counts = [int(body[key]) for key in _LOADS if isinstance(body.get(key), int)]
        if counts:
            return sum(counts[:2])
        body = body.get("loads") or body.get("aggregate")
        if isinstance(body, dict):
            return _running(body)
    if isinstance(body, list):
        found = [value for value in (_running(item) for item in body) if value is not None]
        return sum(found) if found else None
    return None


def look(
    client: Client, question: Question, log: LogSource, stall_timeout: float, clock: Clock | None = None
) -> Finding:
    """Judge a server that runs. Returns as soon as it shows life; only a silent one takes C(stall_timeout) seconds."""
    clock = clock or Clock()
    cursor = log.end()
    window = Deadline(clock, stall_timeout)
    refused = Deadline(clock, min(REFUSED, stall_timeout))
    answer: list[Reply] = []

    def generate() -> None:
        answer.append(client.post(question.path, question.body, stall_timeout))

    def launch() -> threading.Thread:
        thread = threading.Thread(target=generate, daemon=True)
        thread.start()
        return thread

    # Before our own question, so that only those of others count.
    first = sample(client)
    worker = launch()
    occupied = ""
    while True:
        worker.join(min(LOOK, max(0.01, window.left)))
        if answer and answered(answer[-1]):
            return Finding(SERVES, "a generation came back")
        lines, cursor = log.read(cursor)
        seen = activity(lines)
        occupied = seen.occupied or occupied
        if seen.batches:
            return Finding(ADVANCES, "it is busy: batches advance (%d requests running)" % seen.running)
        if not worker.is_alive():
            reply = answer[-1] if answer else Reply(0, None, "no answer")
            if reply.error != "timeout":
                if refused.over:
                    said = "HTTP %d" % reply.status if reply.status else reply.error
                    return Finding(DOUBT, "it refuses a generation (%s)" % said)
                clock.pause(LOOK)
                worker = launch()
        last = sample(client)
        if last.tokens is not None and first.tokens is not None and last.tokens > first.tokens:
            return Finding(ADVANCES, "it is busy: tokens advance")
        if window.over:
            break
    if last.paused:
        return Finding(DOUBT, "no generation in %.0f s, but it is paused or not up" % stall_timeout)
    if occupied:
        return Finding(DOUBT, "no generation in %.0f s, but it is loading or compiling" % stall_timeout)
    if not last.running or not first.running:
        silent = last.running is None or first.running is None
        said = "says nothing about running requests" if silent else "had no other request to work on"
        return Finding(DOUBT, "no generation in %.0f s, but it %s" % (stall_timeout, said))
    if not (first.counts_live and last.counts_live) and not tells_of_decoding(log.tail(_MEMORY)):
        return Finding(
            DOUBT,
            "no generation in %.0f s while %d requests are running, but it never shows whether they advance (no live "
            "counter of tokens in /metrics, no batch in its log): set enable_metrics in sglang_server_args"
            % (stall_timeout, last.running),
        )
    return Finding(
        WEDGED,
        "%d requests are running, nothing advanced in %.0f s, and a generation failed" % (last.running, stall_timeout),
    )
