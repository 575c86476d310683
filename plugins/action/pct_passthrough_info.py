# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs the module pct_passthrough_info and shows its findings; with --diff also the lines that would mend them.

Ansible itself shows the diff of a task only where it changed something, and this one never does.
"""

from __future__ import annotations

import difflib
import typing as t

from ansible_collections.cleanslate.inference.plugins.plugin_utils.shown import ShownAction


class ActionModule(ShownAction):
    def lines(self, result: dict[str, t.Any]) -> list[str]:
        out = ["%s: %s" % (row["severity"], row["msg"]) for row in result.get("findings") or []]
        if self._task.diff:
            for part in result.get("diff") or []:
                before, after = part["before"].splitlines(), part["after"].splitlines()
                out += difflib.unified_diff(
                    before, after, part["before_header"], part["after_header"] + " (mended)", lineterm="", n=2
                )
        return out
