# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Busy, wedged, or not to be told: a server that answers no generation, by what its instruments show."""

from __future__ import annotations

import threading

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.sglang import activity
from ansible_collections.cleanslate.inference.plugins.module_utils.sglang.http import Question, Reply
from ansible_collections.cleanslate.inference.plugins.module_utils.sglang.logs import LogSource

STALL = 0.3
DECODE = "[TP0] Decode batch, #running-req: 148, #token: 9000, token usage: 0.50"
PREFILL = "[TP0] Prefill batch, #new-seq: 1, #new-token: 7, #running-req: 0"
#: A counter that is added to while requests run, and one that is added to when a request has ended.
LIVE = 'sglang:realtime_tokens_total{mode="decode",tp_rank="0"} 640.0\n'
IDLE = 'sglang:realtime_tokens_total{mode="decode",tp_rank="0"} 0.0\n'
AT_THE_END = 'sglang:generation_tokens_total{model_name="m"} 640.0\n'


class Saturated:
    """148 requests are running; ours has to queue for longer than anybody waits."""

    def __init__(self, metrics=None):
        self.metrics = metrics
        self.over = threading.Event()

    def get(self, path, timeout):
        if path == "/metrics" and self.metrics is not None:
            return Reply(200, self.metrics + "sglang:num_running_reqs 148.0\n")
        return Reply(404, None)

    def first(self, names, timeout):
        return Reply(200, [{"num_running_reqs": 148}])

    def post(self, path, body, timeout):
        self.over.wait(timeout)
        return Reply(0, None, "timeout")


class Log(LogSource):
    def __init__(self, *before):
        self.before = list(before)

    def read(self, cursor):
        return [], cursor

    def tail(self, size=65536):
        return self.before

    def end(self):
        return {}


@pytest.mark.parametrize(
    ("metrics", "log", "state"),
    [
        (None, [], activity.DOUBT),
        (None, [PREFILL], activity.DOUBT),
        (None, [PREFILL, DECODE], activity.WEDGED),
        (AT_THE_END, [], activity.DOUBT),
        (IDLE, [], activity.DOUBT),
        (LIVE, [], activity.WEDGED),
        (AT_THE_END, [DECODE], activity.WEDGED),
    ],
)
def test_silence_is_news_only_from_a_server_that_speaks(metrics, log, state):
    client = Saturated(metrics)
    found = activity.look(client, Question.of(False, False), Log(*log), STALL)
    client.over.set()
    assert found.state == state, found.why
