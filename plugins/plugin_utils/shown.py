# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Base of the actions that run their module and show what it found, as it happens."""

from __future__ import annotations

import hashlib
import json
import os
import typing as t

from ansible import constants as C
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.cleanslate.inference.plugins.module_utils.common.text import show
from ansible_collections.cleanslate.inference.plugins.module_utils.state.files import write_atomic

display = Display()


def progress_wanted(task_vars: t.Mapping[str, t.Any]) -> bool:
    """C(cleanslate_progress) is C(auto) (show) or C(off)."""
    return str(task_vars.get("cleanslate_progress", "auto")).lower() not in ("off", "false", "no")


def _whole_path(host: str, action: str) -> str:
    name = hashlib.sha256(("%s %s" % (host, action.rsplit(".", 1)[-1])).encode()).hexdigest()
    return os.path.join(C.DEFAULT_LOCAL_TMP, "cleanslate-%s.json" % name)


def keep_whole(host: str, action: str, result: t.Mapping[str, t.Any]) -> None:
    """Keep a failed result for the report of this run: Ansible prints all of what it registers.

    Ansible removes the folder when the run ends.
    """
    whole = {key: value for key, value in result.items() if key not in ("invocation", "exception")}
    write_atomic(_whole_path(host, action), json.dumps(whole, default=str).encode(), 0o600)


def whole(host: str, action: str, result: t.Any) -> t.Any:
    """The whole of what keep_whole kept of this result; the result itself where nothing was kept."""
    if not isinstance(result, dict):
        return result
    if result.get("failed"):
        try:
            with open(_whole_path(host, action), encoding="utf-8") as handle:
                return json.load(handle)
        except FileNotFoundError:
            pass
    return {key: value for key, value in result.items() if key not in ("invocation", "exception")}


def say(host: str, lines: t.Iterable[str]) -> None:
    """Print lines of one node, each with its name, at once."""
    for line in lines:
        display.display("  %s  %s" % (show(host), line))


class ShownAction(ActionBase):
    """Runs the module of the same name; subclasses say which lines a person should see."""

    #: Parts of a failed result that were shown already and would fill the screen; the report's file has them.
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
        if result.get("failed"):
            keep_whole(task_vars.get("inventory_hostname", "?"), self._task.action, result)
            for key in self.bulky:
                result.pop(key, None)
            self.slim(result)
        return result
