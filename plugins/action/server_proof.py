# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs the module server_proof and shows, for every worker, what reached it of the declared environment."""

from __future__ import annotations

import typing as t

from ansible_collections.cleanslate.inference.plugins.plugin_utils.shown import ShownAction
from ansible_collections.cleanslate.inference.plugins.plugin_utils.tables import table

HEADERS = ("pid", "process", "variables", "missing", "different", "set by SGLang")
#: Processes that are shown one by one; the others (compilers, trackers) are counted.
TOLD = ("main", "scheduler", "detokenizer")


class ActionModule(ShownAction):
    def lines(self, result: dict[str, t.Any]) -> list[str]:
        processes = result.get("processes") or []
        if not processes:
            return [str(result.get("msg", ""))] if self._task.check_mode else []
        out = ["Proof of %s%s" % (result.get("instance"), " (simulated)" if result.get("simulated") else "")]
        told = [row for row in processes if row["role"] in TOLD or row["missing"] or row["different"]]
        out += ["  " + line for line in table(HEADERS, [_cells(row) for row in told])]
        rest = len(processes) - len(told)
        if rest:
            out.append("  and %d helpers with all of it" % rest)
        for item in result.get("arguments") or []:
            if not item["equal"]:
                why = item.get("reason") or "NOT AS DECLARED"
                out.append(
                    "  %s: declared %s, runs with %s (%s)"
                    % (item["argument"], item["requested"], item["effective"], why)
                )
        out += ["  note: " + str(note) for note in result.get("notes") or []]
        if result.get("proven"):
            out.append("  " + str(result.get("msg", "")))
        return out


def _cells(row: dict[str, t.Any]) -> tuple[str, ...]:
    return (
        str(row["pid"]),
        ("%s %s" % (row["role"], row["rank"])).strip(),
        "%d of %d" % (row["checked"] - len(row["missing"]) - len(row["different"]), row["checked"]),
        ", ".join(row["missing"]),
        ", ".join("%s=%s" % (item["name"], item["effective"]) for item in row["different"]),
        ", ".join("%s=%s" % (item["name"], item["effective"]) for item in row["set_by_sglang"]),
    )
