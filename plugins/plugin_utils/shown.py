# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Base of the actions that run their module and show what it found, as it happens."""

from __future__ import annotations

import typing as t

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.cleanslate.inference.plugins.module_utils.common.text import show

display = Display()


def progress_wanted(task_vars: t.Mapping[str, t.Any]) -> bool:
    """C(cleanslate_progress) is C(auto) (show) or C(off)."""
    return str(task_vars.get("cleanslate_progress", "auto")).lower() not in ("off", "false", "no")


def say(host: str, lines: t.Iterable[str]) -> None:
    """Print lines of one node, each with its name, at once."""
    for line in lines:
        display.display("  %s  %s" % (show(host), line))


class ShownAction(ActionBase):
    """Runs the module of the same name; subclasses say which lines a person should see."""

    #: Parts of a failed result that were shown already and would fill the screen; -v keeps them.
    bulky: tuple[str, ...] = ()

    def lines(self, result: dict[str, t.Any]) -> list[str]:
        raise NotImplementedError

    def slim(self, result: dict[str, t.Any]) -> None:
        """Cut down what remains of a failed result."""

    def run(self, tmp: t.Any = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        task_vars = task_vars or {}
        result = super().run(tmp, task_vars)
        result.update(self._execute_module(task_vars=task_vars))
        if progress_wanted(task_vars) and not result.get("unreachable") and not result.get("skipped"):
            say(task_vars.get("inventory_hostname", "?"), self.lines(result))
        if result.get("failed") and display.verbosity == 0:
            for key in self.bulky:
                result.pop(key, None)
            self.slim(result)
        return result
