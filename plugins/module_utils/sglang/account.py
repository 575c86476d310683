# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""The account that a server runs under."""

from __future__ import annotations

import os
import pwd
import typing as t

from ..common.errors import CleanslateError
from ..common.text import show
from .findings import variable


class Account(t.NamedTuple):
    name: str
    uid: int
    gid: int
    home: str
    #: Whether it is another one than the module's own, so that a launch has to change to it.
    other: bool

    @property
    def groups(self) -> list[int]:
        return sorted(os.getgrouplist(self.name, self.gid))


def account(declared: str | None) -> Account:
    """The declared account, or the module's own. Raises CleanslateError when there is none, or none may be taken."""
    uid = os.geteuid()
    try:
        if declared is None:
            entry = pwd.getpwuid(uid)
        else:
            entry = pwd.getpwuid(int(declared)) if declared.isdigit() else pwd.getpwnam(declared)
    except KeyError:
        if declared is None:
            return Account(str(uid), uid, os.getegid(), "/", False)
        raise CleanslateError(
            "%s: there is no account %s on this node." % (variable("user"), show(declared)), variable=variable("user")
        ) from None
    if entry.pw_uid != uid and uid != 0:
        raise CleanslateError(
            "%s: only root can start a server as %s. Run the play with become: true."
            % (variable("user"), show(entry.pw_name)),
            variable=variable("user"),
        )
    return Account(entry.pw_name, entry.pw_uid, entry.pw_gid, entry.pw_dir or "/", entry.pw_uid != uid)
