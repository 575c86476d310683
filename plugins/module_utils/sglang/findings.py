# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""What is wrong with a declaration or a node: always all of it, always with the variable to change."""

from __future__ import annotations

import typing as t


class Finding(t.NamedTuple):
    """One thing that stands in the way."""

    code: str
    msg: str
    #: The role variable that mends it; empty when none does.
    variable: str = ""

    def row(self) -> dict[str, str]:
        return {"code": self.code, "msg": self.msg, "variable": self.variable}


def variable(field: str) -> str:
    """The role variable behind a field of the declaration."""
    return "sglang_server_" + field
