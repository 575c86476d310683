# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Waiting for a server costs little while there is no news."""

from __future__ import annotations

import contextlib
import types

from ansible_collections.cleanslate.inference.plugins.module_utils.common.clock import Clock
from ansible_collections.cleanslate.inference.plugins.module_utils.sglang import ready


class Loading:
    """A server that lives, loads and does not listen."""

    main = (1, 1)

    def __init__(self, lines=()):
        self.now = 0.0
        self.pauses = []
        self.clock = Clock()
        self.clock.now = lambda: self.now
        #: Lines of the log by the number of the look.
        self.lines = dict(lines)
        self.looks = self.scans = 0
        self.details = {}

    def keys(self):
        return {}

    def log(self):
        return self

    def read(self, cursor):
        self.looks += 1
        return self.lines.get(self.looks, []), cursor

    def main_alive(self):
        return True

    def port(self, pids):
        return types.SimpleNamespace(listeners=[])

    def members(self):
        self.scans += 1
        return []

    def open(self, identity):
        return contextlib.nullcontext()

    def wait(self, handles, seconds):
        self.pauses.append(seconds)
        self.now += seconds


def test_looks_become_rare_while_nothing_happens():
    server = Loading()
    answer = ready.wait(server, 20.0, {}, server)
    assert answer["state"] == "waiting"
    assert server.pauses[0] == 0.25
    assert max(server.pauses) == 2.0
    assert server.looks < 20
    assert server.scans == 0


def test_news_make_them_frequent_again():
    server = Loading({6: ["Load weight begin. avail mem=139.00 GB"]})
    assert len(ready.wait(server, 20.0, {}, server)["events"]) == 1
    assert server.pauses[4] > 1.0
    assert server.pauses[5] == 0.25
