# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the checks share: the parts of the checkout, a copy of it, commands, and how findings are told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
COLLECTION = "cleanslate.inference"

sys.path.append(str(ROOT / "tests/suite"))


class CheckError(Exception):
    """What was found; the message is for the contributor who caused it."""


def load_yaml(path: Path) -> Any:
    with path.open(encoding="utf-8") as stream:
        return yaml.safe_load(stream)


def roles() -> list[Path]:
    """The folders of the roles; a collection without roles has not been looked at."""
    found = sorted(path.parent.parent for path in ROOT.glob("roles/*/tasks/main.yml"))
    if not found:
        raise CheckError("there is not one role in roles/")
    return found


def playbooks(with_tasks: bool = False) -> list[Path]:
    """The playbooks, and the task files below them when asked for."""
    found = sorted(ROOT.glob("playbooks/**/*.yml" if with_tasks else "playbooks/*.yml"))
    if not found:
        raise CheckError("there is not one playbook in playbooks/")
    return found


def modules() -> list[str]:
    found = sorted(path.stem for path in ROOT.glob("plugins/modules/*.py") if path.stem != "__init__")
    if not found:
        raise CheckError("there is not one module in plugins/modules/")
    return found


def sources() -> list[str]:
    """Everything that belongs to the checkout, committed or not, as paths below its root."""
    listed = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT)
    return sorted(name for name in set(listed.split("\0")) if name and os.path.lexists(ROOT / name))


def copy_sources(target: Path, leave_out: Sequence[str] = (), keep: Sequence[str] = ()) -> None:
    """Make ``target`` hold the sources but for the folders ``leave_out``, and nothing else but its folders ``keep``."""
    wanted = [name for name in sources() if not _below(name, leave_out)]
    target.mkdir(parents=True, exist_ok=True)
    present = {
        path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_symlink() or not path.is_dir()
    }
    for name in present - set(wanted):
        if not _below(name, keep):
            (target / name).unlink()
    for name in wanted:
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if copy.is_symlink():
            copy.unlink()
        shutil.copy2(ROOT / name, copy, follow_symlinks=False)


def _below(name: str, folders: Sequence[str]) -> bool:
    return name.startswith(tuple(f"{folder}/" for folder in folders))


def run(command: Sequence[str | Path], *, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 300) -> str:
    """stdout of a command that succeeds; otherwise all it said, as an error."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=timeout,
    )
    if done.returncode:
        shown = " ".join(str(word) for word in command)
        raise CheckError(f"{shown}\n(in {cwd}) ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def ansible(tool: str, *arguments: str | Path) -> list[str | Path]:
    """``ansible-TOOL`` by way of Python: a console script would need a path that a shebang can hold."""
    return [sys.executable, "-m", "ansible", tool, *arguments]


def finish(findings: Sequence[str], looked_at: str) -> int:
    """Tell the findings; the exit code."""
    for finding in findings:
        print(finding)
    print(f"{looked_at}: {len(findings)} findings" if findings else f"{looked_at}: all well")
    return 1 if findings else 0
