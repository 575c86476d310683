# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every inventory can be read, has GPU nodes, and fits every playbook."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from common import ROOT, CheckError, ansible, finish, playbooks, run

EXPECTED = ("bare_metal", "demo", "proxmox")


def inventories() -> list[Path]:
    """Folders of inventories/ that hold something; the one that tests/lab writes is read when it is there."""
    found = sorted(path for path in ROOT.glob("inventories/*") if path.is_dir() and any(path.iterdir()))
    missing = sorted(set(EXPECTED) - {path.name for path in found})
    if missing:
        raise CheckError(f"inventories/ lacks {', '.join(missing)}")
    return found


def check(inventory: Path, plays: list[Path]) -> list[str]:
    findings = []
    strict = {"ANSIBLE_INVENTORY_UNPARSED_FAILED": "true", "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "true"}
    listed = json.loads(run(ansible("inventory", "-i", inventory, "--list"), cwd=ROOT, env=strict))
    if not _hosts(listed, "gpu_nodes"):
        findings.append("group gpu_nodes is empty")
    # One start for all playbooks: it is the start that takes time.
    try:
        run(ansible("playbook", "-i", inventory, "--syntax-check", *plays), cwd=ROOT, env=strict)
    except CheckError as error:
        findings.append(str(error))
    return [f"{inventory.relative_to(ROOT)}: {finding}" for finding in findings]


def _hosts(listed: dict[str, dict[str, list[str]]], group: str) -> set[str]:
    held = listed.get(group, {})
    return set(held.get("hosts", ())).union(*(_hosts(listed, child) for child in held.get("children", ())))


def main() -> int:
    found, plays = inventories(), playbooks()
    findings = [finding for inventory in found for finding in check(inventory, plays)]
    return finish(findings, f"{len(found)} inventories, {len(plays)} playbooks")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CheckError as error:
        sys.exit(str(error))
