#!/usr/bin/python
# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Documentation of the action plugin of the same name: it runs on the control node and needs no module."""

from __future__ import annotations

DOCUMENTATION = r"""
module: report
short_description: End a play with a table, a file and the right exit code
version_added: 1.0.0
description:
  - Reads the results that the roles of this collection registered on every node of the play, prints one row a node,
    writes a JSON report, and fails when any node is not as asked for.
  - Runs on the control node, once a play (C(run_once)), and connects nowhere. With C(ignore_unreachable) on the play it
    also names the nodes that did not answer.
author:
  - Contributors to the cleanslate.inference collection (!UNKNOWN)
options:
  title:
    description: What the table is about.
    type: str
    required: true
  path:
    description: File to write the report to, mode 0600. Empty writes none.
    type: str
    default: ""
attributes:
  check_mode:
    support: full
    description: Changes nothing on any node; the table says that it is a prediction.
  diff_mode:
    support: none
    description: There is nothing to compare.
"""

EXAMPLES = r"""
- name: Say what became of every node
  cleanslate.inference.report:
    title: Reset and launch
    path: "{{ cleanslate_report | default('cleanslate-report.json') }}"
  run_once: true
"""

RETURN = r"""
ok:
  description: Whether every node is as asked for.
  type: bool
  returned: always
rows:
  description:
    - One entry a node, with host, instance, outcome, step, reason, gpus, ended, stopped_units, seconds, ok.
    - The report's file has them in any case.
  type: list
  elements: dict
  returned: success
path:
  description: The report's file, empty when none was written.
  type: str
  returned: always
msg:
  description: The verdict in one sentence.
  type: str
  returned: always
"""
