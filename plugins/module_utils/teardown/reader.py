# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Is anybody still there who reads our result?

When the control node dies, sshd closes the pipes of the command that it ran and the shell above us ends; the module
itself would go on. Two signs, each enough: the reading end of stdout is gone (poll(2): POLLERR on a pipe, POLLHUP on a
socket or terminal), or our parent is another one than at the start.
"""

from __future__ import annotations

import os
import select

from ..common.errors import CleanslateError


class ReaderGone(CleanslateError):
    """Nobody reads the result, so nothing more may be done."""


class Reader:
    """Whoever started us, as they were when this object was made."""

    def __init__(self, fd: int = 1) -> None:
        self._parent = os.getppid()
        self._poll = select.poll()
        # No event is asked for: errors and hang-ups are always told.
        self._poll.register(fd, 0)

    @property
    def gone(self) -> bool:
        if os.getppid() != self._parent:
            return True
        return any(event & (select.POLLERR | select.POLLHUP | select.POLLNVAL) for _fd, event in self._poll.poll(0))

    def check(self) -> None:
        """Raise ReaderGone if nobody reads any more."""
        if self.gone:
            raise ReaderGone("Whoever started this module is gone: it stops here and signals nothing further.")
