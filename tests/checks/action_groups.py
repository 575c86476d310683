# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Action group ``all`` of meta/runtime.yml holds every module that runs on a node, and nothing else.

A module without code documents an action that stays on the control node; it has no options in common with the others.
"""

from __future__ import annotations

import sys

from common import ROOT, CheckError, finish, load_yaml, modules


def main() -> int:
    group = load_yaml(ROOT / "meta/runtime.yml")["action_groups"]["all"]
    remote = [name for name in modules() if "\ndef main(" in (ROOT / f"plugins/modules/{name}.py").read_text()]
    findings = [f"{name} is a module and not in the action group" for name in remote if name not in group]
    findings += [f"{name} is in the action group and no module" for name in group if name not in remote]
    if sorted(group) != group:
        findings.append("the action group is not sorted")
    return finish(findings, f"{len(remote)} modules")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CheckError as error:
        sys.exit(str(error))
