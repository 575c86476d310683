# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""The one exception of this collection: a message for people and details for scripts."""

from __future__ import annotations

import typing as t


class CleanslateError(Exception):
    """Something that the caller must know: what is wrong, with what, and how to mend it.

    Modules turn it into a failed result: C(msg) and, beside it, each of C(details).
    """

    def __init__(self, message: str, **details: t.Any) -> None:
        super().__init__(message)
        self.message = message
        self.details = details
