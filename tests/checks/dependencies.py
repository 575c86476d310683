# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every dependency is pinned by a range, and docs/dependencies.md gives that range and a reason."""

from __future__ import annotations

import re
import sys

from common import ROOT, CheckError, finish

FILES = ("meta/ee-requirements.txt", "requirements/*.txt", "tests/unit/requirements.txt")
ROW = re.compile(r"^\| (?P<name>[\w-]+) \| `(?P<range>[^`]+)` \| (?P<why>.{10,}) \|$", re.MULTILINE)


def main() -> int:
    explained = {row["name"]: row["range"] for row in ROW.finditer((ROOT / "docs/dependencies.md").read_text())}
    findings = []
    asked_for: dict[str, set[str]] = {}
    for path in sorted(path for pattern in FILES for path in ROOT.glob(pattern)):
        for line in path.read_text().splitlines():
            if not line or line.startswith(("#", "-r ")):
                continue
            name, bounds = re.findall(r"^([\w-]+)([^;]*?)\s*(?:;.*)?$", line)[0]
            asked_for.setdefault(name, set()).add(bounds)
            if not re.fullmatch(r">=[\w.]+,<[\w.]+", bounds):
                findings.append(f"{path.relative_to(ROOT)}: {line}: not a range")
    for name, bounds in sorted(asked_for.items()):
        if name not in explained:
            findings.append(f"{name} is not in docs/dependencies.md")
        # What differs by Python has one range a Python, and the page gives the two ends.
        elif len(bounds) == 1 and explained[name] not in bounds:
            findings.append(
                f"{name} is {bounds.pop()} in the requirements and {explained[name]} in docs/dependencies.md"
            )
    findings += [f"{name} is in docs/dependencies.md and not required" for name in sorted(explained.keys() - asked_for)]
    if not asked_for:
        raise CheckError("there is not one requirement")
    return finish(findings, f"{len(asked_for)} dependencies")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CheckError as error:
        sys.exit(str(error))
