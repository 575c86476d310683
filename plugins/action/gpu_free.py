# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs the module gpu_free and shows its verdict, GPU by GPU where one is not free."""

from __future__ import annotations

import typing as t

from ansible_collections.cleanslate.inference.plugins.plugin_utils.shown import ShownAction
from ansible_collections.cleanslate.inference.plugins.plugin_utils.tables import ranges, table


class ActionModule(ShownAction):
    bulky = ("details", "holders", "benign_holders", "neighbours", "nvml_processes", "scan", "polls")

    def slim(self, result: dict[str, t.Any]) -> None:
        result["gpus"] = [
            {key: gpu.get(key) for key in ("index", "verdict", "reasons")} for gpu in result.get("gpus") or []
        ]

    def lines(self, result: dict[str, t.Any]) -> list[str]:
        verdict = result.get("predicted_verdict") or result.get("verdict")
        if not verdict:
            return []
        gpus = result.get("gpus") or []
        free = sum(1 for gpu in gpus if gpu.get("verdict") == "free")
        word = "Prediction" if "predicted_verdict" in result else "Proof"
        simulated = " (simulated)" if result.get("simulated") else ""
        out = [
            "%s%s: %s, %d of %d GPUs free now, looked for %.1f s"
            % (word, simulated, verdict, free, len(gpus), float(result.get("waited") or 0))
        ]
        if verdict != "free":
            out += ["  " + line for line in table(("GPU", "verdict", "why"), _why(result))]
        return out


def _why(result: dict[str, t.Any]) -> list[list[str]]:
    """One row for all GPUs of the same trouble, in the order of the GPUs."""
    rows: dict[tuple[str, str], list[int]] = {}
    for gpu in result.get("gpus") or []:
        if gpu.get("verdict") == "free":
            continue
        # A prediction is about what will be left, not about what is measured now.
        codes = result.get("predicted_reasons") if "predicted_verdict" in result else gpu.get("reasons")
        codes = codes or []
        texts = [
            str(detail.get("msg"))
            for detail in result.get("details") or []
            if detail.get("gpu") == gpu.get("index") and detail.get("code") in codes
        ]
        why = "; ".join(texts[:2]) + ("; %d more" % (len(texts) - 2) if len(texts) > 2 else "")
        rows.setdefault((str(gpu.get("verdict")), why or ", ".join(codes)), []).append(int(gpu.get("index") or 0))
    return [[",".join(ranges(gpus)), verdict, why] for (verdict, why), gpus in rows.items()]
