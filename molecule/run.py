#!/usr/bin/env python3
# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""run.py SCENARIO: `molecule test` of one scenario, as tests/run does it.

Begins without what a run that was killed has left, and ends the scenario's lab whatever happens.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(scenario: str) -> int:
    state = ROOT / "build/molecule-state" / scenario
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",
        "MOLECULE_GLOB": "molecule/*/molecule.yml",
        "MOLECULE_EPHEMERAL_DIRECTORY": str(state),
        "CLEANSLATE_LAB_DIR": str(ROOT / "build/molecule" / scenario),
    }
    shutil.rmtree(state, ignore_errors=True)
    end_lab(environment)
    command = [sys.executable, "-m", "molecule", "test", "--scenario-name", scenario]
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    # Molecule itself leaves its hosts when it is told to end. Who ends a stage tells the whole process group.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _frame: process.send_signal(number))
    try:
        code = process.wait()
    finally:
        end_lab(environment)
    return code if code >= 0 else 128 - code


def end_lab(environment: dict[str, str]) -> None:
    subprocess.run([ROOT / "tests/lab/lab", "clean"], env=environment, check=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
