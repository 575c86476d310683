# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs the module pct_passthrough and shows what it mended, what it left, and what no line can mend."""

from __future__ import annotations

import typing as t

from ansible_collections.cleanslate.inference.plugins.plugin_utils.shown import ShownAction


class ActionModule(ShownAction):
    def lines(self, result: dict[str, t.Any]) -> list[str]:
        verb = "would be mended" if self._task.check_mode else "mended"
        out = []
        for row in result.get("fixed") or []:
            later = "; it has this after `pct reboot %s`" % row["vmid"] if row["restart"] else ""
            out.append("container %s (%s) %s: %s%s" % (row["vmid"], row["name"], verb, ", ".join(row["codes"]), later))
        out += [
            "container %s (%s) left as it is: %s" % (r["vmid"], r["name"], r["reason"])
            for r in result.get("kept") or []
        ]
        return out + ["%s: %s" % (row["severity"], row["msg"]) for row in result.get("findings") or []]
