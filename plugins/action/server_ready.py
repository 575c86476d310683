# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Waits for a server: asks the node window by window and shows what happens there as it happens."""

from __future__ import annotations

import typing as t

from ansible.plugins.action import ActionBase

from ansible_collections.cleanslate.inference.plugins.plugin_utils.shown import progress_wanted, say


class ActionModule(ActionBase):
    def run(self, tmp: t.Any = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        task_vars = task_vars or {}
        result = super().run(tmp, task_vars)
        host = task_vars.get("inventory_hostname", "?")
        shown = progress_wanted(task_vars)
        args = dict(self._task.args)
        events: list[str] = []
        while True:
            # Each call ends on the node by itself, so that nothing waits there for a control node that is gone.
            answer = self._execute_module(module_args=args, task_vars=task_vars)
            events += answer.get("events") or []
            if shown:
                say(host, answer.get("events") or [])
            if answer.get("state") != "waiting" or self._task.check_mode:
                break
            if float(answer.get("elapsed", 0)) >= float(answer.get("timeout", 0)):
                answer["failed"] = True
                answer["state"] = "timeout"
                answer["msg"] = "%s did not become ready within %.0f s; the last phase was %s%s." % (
                    answer.get("instance"),
                    float(answer.get("timeout", 0)),
                    answer.get("phase"),
                    " (%s)" % answer["last"] if answer.get("last") else "",
                )
                break
            args["cursor"] = answer.get("cursor") or {}
        result.update(answer)
        result["events"] = events
        return result
