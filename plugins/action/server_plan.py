# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs the module server_plan and shows the plan: who holds the GPUs, what would end, what blocks, what differs."""

from __future__ import annotations

import typing as t

from ansible_collections.cleanslate.inference.plugins.plugin_utils.shown import ShownAction
from ansible_collections.cleanslate.inference.plugins.plugin_utils.tables import PROCESS_HEADERS, process_rows, table


class ActionModule(ShownAction):
    bulky = (
        "argv",
        "environment",
        "nccl",
        "resolved",
        "teardown",
        "changes",
        "devices",
        "ports",
        "reasons",
        "gpus",
        "notes",
        "python",
    )

    def lines(self, result: dict[str, t.Any]) -> list[str]:
        teardown = result.get("teardown") or {}
        rows = process_rows(teardown.get("targets") or [], "end") + process_rows(teardown.get("spared") or [], "spare")
        if not rows and not result.get("verdict"):
            return []
        title = "Plan for %s" % (result.get("instance") or "this node")
        if result.get("simulated"):
            title += " (simulated)"
        out = ["%s: %s" % (title, result.get("verdict"))]
        out += ["  " + _text(reason) for reason in result.get("reasons") or []]
        if rows:
            out += ["  " + line for line in table(PROCESS_HEADERS, rows)]
        out += [
            "  %s: %s -> %s" % (change["key"], _value(change["before"]), _value(change["after"]))
            for change in result.get("changes") or []
        ]
        out += ["  note: " + str(note) for note in result.get("notes") or []]
        out += ["  blocks: " + _text(finding) for finding in result.get("blocked") or []]
        return out


def _value(value: t.Any) -> str:
    return "(nothing)" if value is None else str(value)


def _text(finding: t.Any) -> str:
    return str(finding.get("msg") or finding.get("code")) if isinstance(finding, dict) else str(finding)
