# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""What each process of a server is, by its title: main, scheduler with its ranks, detokenizer, helper.

Facts: sglang 0.5.17 to 0.5.23 (setproctitle in managers/scheduler.py, detokenizer_manager.py,
data_parallel_controller.py); the kernel cuts the command name to 15 bytes, the title is the whole command line.
"""

from __future__ import annotations

import re
import typing as t

from ..proc.table import Process

_SCHEDULER = re.compile(r"sglang::scheduler((?:_(?:DP|PP|TP|EP|CP|MoE_?DP)\d+)*)\s*")
_TITLE = re.compile(r"sglang::([a-z_]+)")


class Role(t.NamedTuple):
    #: main, scheduler, detokenizer, data_parallel_controller, …, tracker, compiler, supervisor, other
    kind: str
    #: Ranks of a scheduler as its title has them, C(TP0), C(DP1_TP0); empty for the only one.
    rank: str = ""

    @property
    def label(self) -> str:
        return "%s %s" % (self.kind, self.rank) if self.rank else self.kind


def role_of(process: Process, main_pid: int = 0, supervisor_pid: int = 0) -> Role:
    title = process.title
    match = _SCHEDULER.fullmatch(title)
    if match:
        return Role("scheduler", match.group(1).lstrip("_"))
    if process.pid == main_pid:
        return Role("main")
    if process.pid == supervisor_pid:
        return Role("supervisor")
    named = _TITLE.match(title)
    if named:
        return Role(named.group(1))
    words = " ".join(process.argv)
    if "multiprocessing.resource_tracker" in words:
        return Role("tracker")
    if "_inductor/compile_worker" in words:
        return Role("compiler")
    return Role("other")


def schedulers(processes: t.Iterable[Process]) -> list[Process]:
    """The workers among the members of an instance, one a GPU; zombies are gone."""
    return [p for p in processes if not p.zombie and role_of(p).kind == "scheduler"]
