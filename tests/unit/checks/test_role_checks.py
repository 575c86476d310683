# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The checks of the roles find what they are there for, and let a sound role pass."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

SOUND = {
    "roles/thing/README.md": "A thing.\n",
    "roles/thing/defaults/main.yml": 'thing_size: 3\nthing_name: "{{ inventory_hostname }}"\nthing_on: true\n',
    "roles/thing/vars/main.yml": "_thing_limit: 9\n",
    "roles/thing/tasks/main.yml": (
        "- name: Ask\n"
        "  ansible.builtin.command: 'ask {{ thing_size }} {{ thing_name }} {{ _thing_limit }}'\n"
        "  when: thing_on\n"
        "  register: __thing_answer\n"
        "- name: Tell\n"
        "  ansible.builtin.debug:\n"
        "    var: __thing_answer\n"
    ),
    "roles/thing/meta/argument_specs.yml": (
        "argument_specs:\n"
        "  main:\n"
        "    short_description: A thing\n"
        "    options:\n"
        "      thing_size: {type: int, default: 3, description: Its size.}\n"
        "      thing_name: {type: str, description: Its name.}\n"
        "      thing_on: {type: bool, default: true, description: Whether it is on.}\n"
    ),
    "playbooks/play.yml": "- hosts: all\n  roles:\n    - role: thing\n      vars:\n        thing_size: 4\n",
}


def check(root: Path, name: str, changes: dict[str, tuple[str, str]]) -> tuple[int, str]:
    """Exit code and output of a check on the sound tree with some text replaced."""
    tree = dict(SOUND)
    for path, (old, new) in changes.items():
        assert old in tree[path]
        tree[path] = tree[path].replace(old, new)
    for path, text in tree.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "tests/checks").mkdir(parents=True)
    for file in ("common.py", name):
        shutil.copy(ROOT / "tests/checks" / file, root / "tests/checks")
    done = subprocess.run(
        [sys.executable, root / "tests/checks" / name], capture_output=True, text=True, check=False, timeout=60
    )
    return done.returncode, done.stdout + done.stderr


SPECS = "roles/thing/meta/argument_specs.yml"
DEFAULTS = "roles/thing/defaults/main.yml"
TASKS = "roles/thing/tasks/main.yml"


@pytest.mark.parametrize("name", ["argument_specs.py", "role_variables.py"])
def test_a_sound_role_passes(tmp_path: Path, name: str) -> None:
    code, output = check(tmp_path, name, {})
    assert code == 0, output


@pytest.mark.parametrize("name", ["argument_specs.py", "role_variables.py"])
def test_no_role_at_all_is_a_failure(tmp_path: Path, name: str) -> None:
    (tmp_path / "tests/checks").mkdir(parents=True)
    for file in ("common.py", name):
        shutil.copy(ROOT / "tests/checks" / file, tmp_path / "tests/checks")
    command = [sys.executable, tmp_path / "tests/checks" / name]
    assert subprocess.run(command, capture_output=True, check=False, timeout=60).returncode != 0


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({DEFAULTS: ("thing_size: 3", "thing_size: 4")}, "thing_size is 4 in defaults/main.yml, 3 in"),
        ({DEFAULTS: ("thing_size: 3", "thing_size: 3\nthing_new: 1")}, "thing_new is in defaults/main.yml and not"),
        ({DEFAULTS: ("thing_size: 3\n", "")}, "thing_size is in meta/argument_specs.yml and not"),
        ({DEFAULTS: ("thing_on: true", "thing_on: 1")}, "thing_on is 1 in defaults/main.yml, True in"),
        ({DEFAULTS: ("thing_on: true", "thing_on: 'yes'")}, "which is no bool"),
        ({SPECS: ("default: 3, ", "")}, "thing_size is 3 in defaults/main.yml and has no default"),
        ({SPECS: ("default: 3, ", "required: true, ")}, "thing_size is required and yet has a default"),
        ({SPECS: (", description: Its size.", "")}, "thing_size has no description"),
        ({SPECS: ("type: int, default: 3", "type: int, default: 3, choices: [1, 2]")}, "none of [1, 2]"),
        ({SPECS: ("thing_size", "size")}, "size does not begin with thing_"),
        ({SPECS: ("  main:", "  other:")}, "there is no entry point main"),
    ],
)
def test_argument_specs_that_differ_are_found(
    tmp_path: Path, changes: dict[str, tuple[str, str]], finding: str
) -> None:
    code, output = check(tmp_path, "argument_specs.py", changes)
    assert code == 1
    assert finding in output


@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({TASKS: (" {{ thing_name }}", "")}, "thing_name is used nowhere in the role"),
        ({TASKS: (" {{ _thing_limit }}", "")}, "_thing_limit is used nowhere in the role"),
        ({TASKS: ("when: thing_on", "when: thing_onn")}, "names thing_onn, which nothing defines"),
        ({TASKS: ("register: __thing_answer", "register: thing_answer")}, "should begin with __thing_"),
        ({DEFAULTS: ("thing_on", "on_thing")}, "on_thing of defaults/ should begin with thing_"),
        ({"playbooks/play.yml": ("thing_size", "thing_sise")}, "names thing_sise, which role thing does not offer"),
        ({"playbooks/play.yml": ("thing_size", "_thing_limit")}, "names _thing_limit, which role thing does not offer"),
    ],
)
def test_variables_that_break_the_grammar_are_found(
    tmp_path: Path, changes: dict[str, tuple[str, str]], finding: str
) -> None:
    code, output = check(tmp_path, "role_variables.py", changes)
    assert code == 1
    assert finding in output
