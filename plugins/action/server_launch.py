# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs the module server_launch and shows what was started: where its output is, and NCCL's effective variables."""

from __future__ import annotations

import typing as t

from ansible_collections.cleanslate.inference.plugins.plugin_utils.shown import ShownAction


class ActionModule(ShownAction):
    def lines(self, result: dict[str, t.Any]) -> list[str]:
        if result.get("failed"):
            return []
        out = [str(result.get("msg", ""))]
        nccl = result.get("nccl") or {}
        if nccl:
            out.append("  " + ", ".join("%s=%s" % (name, item["value"]) for name, item in sorted(nccl.items())))
        return out
