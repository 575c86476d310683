# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Deadlines count on the given clock, and errors carry what scripts need."""

from __future__ import annotations

import time
import typing as t

from ansible_collections.cleanslate.inference.plugins.module_utils.common.clock import Clock, Deadline
from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError

if t.TYPE_CHECKING:
    from .conftest import FakeClock


def test_a_deadline_counts_down_and_never_below_nothing(clock: FakeClock) -> None:
    deadline = Deadline(clock, 2.0)
    seen = []
    while not deadline.over:
        seen.append((deadline.elapsed, deadline.left))
        clock.pause(0.75)
    assert seen == [(0.0, 2.0), (0.75, 1.25), (1.5, 0.5)]
    assert (deadline.elapsed, deadline.left) == (2.25, 0.0)


def test_a_deadline_of_nothing_is_over_at_once(clock: FakeClock) -> None:
    for seconds in (0.0, -5.0):
        assert Deadline(clock, seconds).over
        assert Deadline(clock, seconds).left == 0.0


def test_the_real_clock_does_not_jump_and_pauses_as_long_as_it_is_told() -> None:
    clock, started = Clock(), time.monotonic()
    before = clock.now()
    clock.pause(0.02)
    clock.pause(0.0)
    clock.pause(-1.0)
    assert 0.02 <= clock.now() - before <= time.monotonic() - started


def test_an_error_is_a_message_and_details() -> None:
    error = CleanslateError("what and how to mend it", pid=5)
    assert (str(error), error.message, error.details) == ("what and how to mend it",) * 2 + ({"pid": 5},)
