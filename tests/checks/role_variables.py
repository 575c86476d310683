# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Variables of roles follow the grammar, are all used, and are all defined.

``role_x`` is public (defaults/), ``_role_x`` a constant (vars/), ``__role_x`` a result or another name inside the role.
Playbooks may set a role's public variables and read its results, nothing else of it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import ROOT, CheckError, finish, load_yaml, playbooks, roles

#: Where a role names a variable that it makes.
MAKING_KEYS = ("register", "loop_var", "index_var")
MAKING_MAPS = ("vars", "ansible.builtin.set_fact", "set_fact")


class Role:
    """The variables that one role defines, makes and names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.public = set(self._keys("defaults"))
        self.constants = set(self._keys("vars"))
        self.texts = {
            file: _without_comments(file)
            for folder in ("defaults", "vars", "tasks", "handlers", "templates")
            for file in sorted((path / folder).rglob("*"))
            if file.is_file()
        }
        self.made = {
            name
            for folder in ("tasks", "handlers")
            for file in sorted((path / folder).rglob("*.yml"))
            for name in _made(load_yaml(file))
        }

    def _keys(self, folder: str) -> Iterator[str]:
        for file in sorted((self.path / folder).rglob("*.yml")):
            yield from load_yaml(file) or {}

    def named(self, text: str) -> set[str]:
        """What looks like a variable of this role in a text."""
        return set(re.findall(rf"(?<![\w./-])_{{0,2}}{self.name}_\w+", text))

    def findings(self) -> Iterator[str]:
        for name in sorted(self.public):
            if not re.fullmatch(rf"{self.name}_\w+", name):
                yield f"{name} of defaults/ should begin with {self.name}_"
        for name in sorted(self.constants):
            if not re.fullmatch(rf"_{self.name}_\w+", name):
                yield f"{name} of vars/ should begin with _{self.name}_"
        for name in sorted(self.made):
            if not re.fullmatch(rf"__{self.name}_\w+", name):
                yield f"{name} is made by tasks and should begin with __{self.name}_"
        for name in sorted(self.public | self.constants):
            uses = sum(len(re.findall(rf"(?<!\w){re.escape(name)}(?!\w)", text)) for text in self.texts.values())
            if uses < 2:  # its own definition is one
                yield f"{name} is used nowhere in the role"
        defined = self.public | self.constants | self.made
        for file, text in self.texts.items():
            for name in sorted(self.named(text) - defined):
                yield f"{file.relative_to(self.path)} names {name}, which nothing defines"


def _made(node: Any) -> Iterator[str]:
    if isinstance(node, list):
        for item in node:
            yield from _made(item)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key in MAKING_KEYS and isinstance(value, str):
                yield value
            elif key in MAKING_MAPS and isinstance(value, dict) and not _includes_role(node):
                yield from (name for name in value if name != "cacheable")
            else:
                yield from _made(value)


def _includes_role(task: dict[str, Any]) -> bool:
    """Variables given to another role are that role's."""
    return any(key.endswith(("include_role", "import_role")) for key in task)


def _without_comments(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("#"))


def main() -> int:
    known = [Role(path) for path in roles()]
    findings = [f"roles/{role.name}: {finding}" for role in known for finding in role.findings()]
    for role in known:
        for other in known:
            if other is not role:
                findings += [
                    f"{file.relative_to(ROOT)} names {name}, which is private to role {other.name}"
                    for file, text in role.texts.items()
                    for name in sorted(other.named(text) - other.public - other.made)
                ]
    for playbook in playbooks(with_tasks=True):
        text = _without_comments(playbook)
        for role in known:
            for name in sorted(role.named(text) - role.public - role.made):
                findings.append(f"{playbook.relative_to(ROOT)} names {name}, which role {role.name} does not offer")
    return finish(findings, f"{len(known)} roles, {sum(len(role.public) for role in known)} public variables")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CheckError as error:
        sys.exit(str(error))
