# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs the module gpu_teardown and shows which processes were (or would be) ended, and which were spared and why."""

from __future__ import annotations

import typing as t

from ansible_collections.cleanslate.inference.plugins.plugin_utils.shown import ShownAction
from ansible_collections.cleanslate.inference.plugins.plugin_utils.tables import PROCESS_HEADERS, process_rows, table


class ActionModule(ShownAction):
    bulky = ("spared",)

    def lines(self, result: dict[str, t.Any]) -> list[str]:
        verb = "would end" if self._task.check_mode else "ended"
        rows = process_rows(result.get("killed") or [], verb)
        rows += process_rows(result.get("survivors") or [], "ALIVE")
        rows += process_rows(result.get("spared") or [], "spared")
        units = result.get("stopped_units") or []
        if not rows and not units:
            return []
        out = ["Teardown (simulated)" if result.get("simulated") else "Teardown"]
        out += ["  %s unit %s" % ("would stop" if self._task.check_mode else "stopped", unit) for unit in units]
        if rows:
            out += ["  " + line for line in table(PROCESS_HEADERS, rows)]
        return out
