# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The end of every playbook: one table for people, one file for scripts, one exit code."""

from __future__ import annotations

import datetime
import json
import os
import typing as t

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.state.files import make_dir, write_atomic
from ansible_collections.cleanslate.inference.plugins.plugin_utils.report import (
    ACTIONS,
    INSTANCES,
    REPORT_HEADERS,
    STEPS,
    cells,
    node_rows,
)
from ansible_collections.cleanslate.inference.plugins.plugin_utils.shown import whole
from ansible_collections.cleanslate.inference.plugins.plugin_utils.tables import table

display = Display()


class ActionModule(ActionBase):
    """Reads what the roles registered on every node of the play. Runs on the control node, connects nowhere."""

    TRANSFERS_FILES = False
    _requires_connection = False

    def run(self, tmp: t.Any = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        result = super().run(tmp, task_vars)
        task_vars = task_vars or {}
        _validation, arguments = self.validate_argument_spec(
            argument_spec={"title": {"type": "str", "required": True}, "path": {"type": "str", "default": ""}}
        )
        hosts = list(task_vars.get("ansible_play_hosts_all") or [])
        hostvars = task_vars["hostvars"]
        check = bool(self._task.check_mode)
        run_tags, skip_tags = (list(task_vars.get(name) or []) for name in ("ansible_run_tags", "ansible_skip_tags"))
        partly = run_tags not in ([], ["all"]) or bool(skip_tags)
        rows = [row for host in hosts for row in node_rows(host, hostvars[host], check, partly)]
        bad = [row for row in rows if not row["ok"]]
        path = os.path.abspath(os.path.expanduser(arguments["path"])) if arguments["path"] else ""
        if path:
            self._write(path, arguments["title"], rows, check, {host: hostvars[host] for host in hosts})
        self._show(arguments["title"], rows, check, path)
        result.update(changed=False, ok=not bad and bool(rows), path=path, msg=_verdict(rows, bad))
        if result["ok"]:
            result["rows"] = rows
        else:
            # The rows were shown as a table already; Ansible would print them again with the failure.
            result["failed"] = True
        return result

    def _show(self, title: str, rows: list[dict[str, t.Any]], check: bool, path: str) -> None:
        head = title
        if check:
            head += " (check mode: nothing was changed)"
        if any(row["simulated"] for row in rows):
            head += " (simulated GPUs)"
        display.display("\n" + head)
        for line in table(REPORT_HEADERS, [cells(row) for row in rows]):
            display.display("  " + line)
        for row in rows:
            for warning in row["warnings"]:
                display.display("  %s: note: %s" % (row["host"], warning))
        if path:
            display.display("  Details: " + path)
        display.display("")

    def _write(
        self, path: str, title: str, rows: list[dict[str, t.Any]], check: bool, hostvars: dict[str, t.Any]
    ) -> None:
        steps = {
            host: {
                step: whole(host, ACTIONS.get(step, step), variables[variable])
                for step, variable in STEPS
                if variable in variables
            }
            for host, variables in hostvars.items()
        }
        report = {
            "format": 1,
            "title": title,
            "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "check_mode": check,
            "ok": bool(rows) and all(row["ok"] for row in rows),
            "nodes": rows,
            "steps": steps,
            "servers": {host: variables.get(INSTANCES, {}) for host, variables in hostvars.items()},
        }
        text = json.dumps(report, indent=1, sort_keys=True, default=str)
        try:
            make_dir(os.path.dirname(path))
            write_atomic(path, text.encode() + b"\n", 0o600)
        except CleanslateError as error:
            raise AnsibleActionFail("cleanslate_report: %s" % error) from error


def _verdict(rows: list[dict[str, t.Any]], bad: list[dict[str, t.Any]]) -> str:
    if not rows:
        return "No node was in this play: look at cleanslate_hosts and --limit."
    nodes = len({row["host"] for row in rows})
    if not bad:
        return "%d of %d nodes are as asked for." % (nodes, nodes)
    names = ", ".join(
        "%s (%s)" % (" ".join(filter(None, (row["host"], row["instance"]))), row["outcome"]) for row in bad[:10]
    )
    more = "" if len(bad) <= 10 else " and %d more" % (len(bad) - 10)
    wrong = len({row["host"] for row in bad})
    return "%d of %d nodes are not as asked for: %s%s." % (wrong, nodes, names, more)
