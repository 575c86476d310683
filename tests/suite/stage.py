# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a stage of the checks is, what it may need, and what came out of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
LOGS = BUILD / "logs"

Need = Callable[[], str | None]
"""Asked before a stage starts: ``None``, or the reason why it cannot run here."""


@dataclass(frozen=True)
class Stage:
    """One line of the checks: a command that exits with 0 when all is well."""

    name: str
    command: Sequence[str | Path]
    group: str
    #: Where the command starts, below the root of the checkout.
    cwd: Path = ROOT
    #: The programs that come first on PATH: those of a virtual environment.
    tools: Path = ROOT / ".venv/bin"
    #: On top of the environment that every stage gets.
    env: Mapping[str, str] = field(default_factory=dict)
    #: All of them must be met.
    needs: Sequence[Need] = ()
    #: Report of pytest, or a folder of reports: the tests are counted in place of the stage; none at all is a failure.
    junit: Path | None = None
    #: May run beside another stage. What measures time or starts servers may not.
    shares_machine: bool = False
    #: Seconds until the command is ended and the stage has failed.
    timeout: float = 600


@dataclass(frozen=True)
class Outcome:
    """What one stage came to: numbers of tests, and why it failed or was skipped."""

    stage: Stage
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    reason: str = ""
    log: Path | None = None


# -- Needs -----------------------------------------------------------------------------------------------------------


def root() -> str | None:
    return None if os.geteuid() == 0 else "needs root"


def linux() -> str | None:
    return None if sys.platform == "linux" else "needs Linux"


def commands(*names: str) -> Need:
    """These programs are on PATH (or in the folders of system programs)."""

    def need() -> str | None:
        path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
        missing = [name for name in names if shutil.which(name, path=path) is None]
        return f"needs {', '.join(missing)}" if missing else None

    return need


def python(version: str) -> Need:
    """A Python of this version that can make virtual environments."""

    def need() -> str | None:
        return None if find_python(version) else f"needs Python {version}"

    return need


def find_python(version: str) -> str | None:
    found = subprocess.run(
        [ROOT / ".config/find-python", version], capture_output=True, text=True, check=False, timeout=60
    )
    return found.stdout.strip() if found.returncode == 0 else None


# -- Reports of pytest -----------------------------------------------------------------------------------------------


def read_junit(path: Path) -> tuple[int, int, int]:
    """(passed, failed, skipped) of a report or a folder of them; ``ValueError`` when they tell of no test at all."""
    try:
        reports = sorted(path.glob("*.xml")) if path.is_dir() else [path]
        suites = [suite for report in reports for suite in ET.parse(report).getroot().iter("testsuite")]
    except (OSError, ET.ParseError) as error:
        raise ValueError(f"no report of the tests: {error}") from error
    tests, failures, errors, skipped = (
        sum(int(suite.get(key, "0")) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
    )
    if tests == 0:
        raise ValueError("not one test was found")
    return tests - failures - errors - skipped, failures + errors, skipped
