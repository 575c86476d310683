# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every role's meta/argument_specs.yml says the same as its defaults/main.yml and its task files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from common import CheckError, finish, load_yaml, roles

TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "dict": (dict,),
    "float": (int, float),
    "int": (int,),
    "list": (list,),
    "path": (str,),
    "raw": (object,),
    "str": (str,),
}


def check(role: Path) -> list[str]:
    """Findings of one role."""
    specs = (load_yaml(role / "meta/argument_specs.yml") or {}).get("argument_specs") or {}
    defaults = load_yaml(role / "defaults/main.yml") if (role / "defaults/main.yml").exists() else None
    defaults = defaults or {}
    findings = []
    if "main" not in specs:
        findings.append("meta/argument_specs.yml: there is no entry point main")
    options: dict[str, dict[str, Any]] = {}
    for entry, spec in specs.items():
        if not any((role / "tasks" / f"{entry}{suffix}").is_file() for suffix in (".yml", ".yaml")):
            findings.append(f"meta/argument_specs.yml: entry point {entry} has no tasks/{entry}.yml")
        if not spec.get("short_description"):
            findings.append(f"meta/argument_specs.yml: entry point {entry} has no short_description")
        options.update(spec.get("options") or {})
    for name in sorted(defaults.keys() - options.keys()):
        findings.append(f"{name} is in defaults/main.yml and not in meta/argument_specs.yml")
    for name, option in sorted(options.items()):
        findings += _check_option(role.name, name, option, defaults)
    return [f"roles/{role.name}: {finding}" for finding in findings]


def _check_option(role: str, name: str, option: dict[str, Any], defaults: dict[str, Any]) -> list[str]:
    findings = []
    if not name.startswith(f"{role}_"):
        findings.append(f"{name} does not begin with {role}_")
    if not option.get("description"):
        findings.append(f"{name} has no description")
    if option.get("required"):
        if name in defaults:
            findings.append(f"{name} is required and yet has a default in defaults/main.yml")
        return findings
    if name not in defaults:
        findings.append(f"{name} is in meta/argument_specs.yml and not in defaults/main.yml (nor required)")
        return findings
    value = defaults[name]
    computed = isinstance(value, str) and "{{" in value
    if "default" in option:
        if option["default"] != value or isinstance(option["default"], bool) is not isinstance(value, bool):
            findings.append(f"{name} is {value!r} in defaults/main.yml, {option['default']!r} in argument_specs.yml")
    elif not computed and value is not None:
        findings.append(f"{name} is {value!r} in defaults/main.yml and has no default in meta/argument_specs.yml")
    kind = option.get("type", "str")
    if not computed and value is not None and not _is_of(value, kind):
        findings.append(f"{name} is {value!r} in defaults/main.yml, which is no {kind}")
    choices = option.get("choices")
    if choices and not computed and value is not None and value not in choices:
        findings.append(f"{name} is {value!r} in defaults/main.yml, which is none of {choices}")
    return findings


def _is_of(value: Any, kind: str) -> bool:
    if isinstance(value, bool) and kind not in ("bool", "raw"):
        return False
    return isinstance(value, TYPES.get(kind, (object,)))


def main() -> int:
    found = roles()
    findings = []
    for role in found:
        for needed in ("meta/argument_specs.yml", "README.md"):
            if not (role / needed).is_file():
                findings.append(f"roles/{role.name}: there is no {needed}")
        if (role / "meta/argument_specs.yml").is_file():
            findings += check(role)
    return finish(findings, f"{len(found)} roles")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CheckError as error:
        sys.exit(str(error))
