# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Time as an object, so that everything that waits can be tested without waiting."""

from __future__ import annotations

import time


class Clock:
    """Monotonic time in seconds, and pauses between two looks at something that gives no event."""

    def now(self) -> float:
        return time.monotonic()

    def pause(self, seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)


class Deadline:
    """A point in monotonic time. C(seconds) from now, on the given clock."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self.clock = clock
        self.seconds = seconds
        self._started = clock.now()

    @property
    def elapsed(self) -> float:
        return self.clock.now() - self._started

    @property
    def left(self) -> float:
        return max(0.0, self.seconds - self.elapsed)

    @property
    def over(self) -> bool:
        return self.elapsed >= self.seconds
