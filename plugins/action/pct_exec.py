# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs the module pct_exec, judges `changed_when` expressions by what the commands said, shows what was done."""

from __future__ import annotations

import typing as t

from ansible.errors import AnsibleError

from ansible_collections.cleanslate.inference.plugins.module_utils.pct.execute import diffs
from ansible_collections.cleanslate.inference.plugins.module_utils.pct.wanted import is_truth_value
from ansible_collections.cleanslate.inference.plugins.plugin_utils.shown import ShownAction


class ActionModule(ShownAction):
    def run(self, tmp: t.Any = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        self._task_vars = task_vars or {}
        return super().run(tmp, task_vars)

    def _execute_module(self, *args: t.Any, **kwargs: t.Any) -> dict[str, t.Any]:
        result: dict[str, t.Any] = super()._execute_module(*args, **kwargs)
        self._judge(result)
        return result

    # -- changed_when --------------------------------------------------------------------------------------------------

    def _judge(self, result: dict[str, t.Any]) -> None:
        """Replace the module's "it ran, so it changed something" where the user has given an expression."""
        asked, shared = (self._task.args.get(name) for name in ("containers", "commands"))
        if not isinstance(asked, list):
            return  # ids in one text, or nothing at all
        shared = shared if isinstance(shared, list) else []
        for row, entry in zip(result.get("containers") or [], asked, strict=False):
            own = entry.get("commands") if isinstance(entry, dict) else None
            for command in row["commands"]:
                given = (shared if own is None else own)[command["index"]]
                expression = given.get("changed_when", True) if isinstance(given, dict) else True
                if command["skipped"] or "rc" not in command or is_truth_value(expression):
                    continue
                command["changed"] = self._evaluate(expression, row["vmid"], command)
            row["changed"] = row["state_changed"] or any(command["changed"] for command in row["commands"])
        if "containers" in result:
            result["changed"] = any(row["changed"] for row in result["containers"])
        if "diff" in result:
            result["diff"] = diffs(result["containers"])

    def _evaluate(self, expression: str, vmid: int, command: dict[str, t.Any]) -> bool:
        said = {
            "vmid": vmid,
            "rc": command["rc"],
            "stdout": command["stdout"],
            "stderr": command["stderr"],
            "stdout_lines": command["stdout"].splitlines(),
        }
        templar = self._templar.copy_with_new_env(available_variables={**self._task_vars, **said})
        try:
            return bool(templar.evaluate_conditional(expression))
        except AnsibleError as error:
            raise AnsibleError(f"changed_when of `{command['cmd']}` (container {vmid}): {error}") from error

    # -- what a person sees --------------------------------------------------------------------------------------------

    def lines(self, result: dict[str, t.Any]) -> list[str]:
        out = []
        for row in result.get("containers") or []:
            name = f"container {row['vmid']}" + (f" ({row['name']})" if row["name"] else "")
            if row["failed"]:
                out.append(f"{name}: failed, {row['code']}: {row['msg']}")
            elif row["changed"]:
                out.append(f"{name}: {self._told(row)}")
        return out

    def _told(self, row: dict[str, t.Any]) -> str:
        would = "would be " if self._task.check_mode else ""
        parts = [f"{would}{row['status']}, was {row['status_before']}"] if row["state_changed"] else []
        ran = [command for command in row["commands"] if command["changed"]]
        if ran:
            parts.append(f"{would}run: " + "; ".join(command["cmd"] for command in ran))
        return ", ".join(parts)
