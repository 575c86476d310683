# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The stand-in library of NVIDIA, and processes that look through it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
LIBRARY = ROOT / "tests/lab/nvml"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the stand-in libnvidia-ml.so.1."""
    out = tmp_path_factory.mktemp("nvml")
    subprocess.run(["make", "-s", "-C", str(LIBRARY), "OUT=%s" % out], check=True)
    return out


@pytest.fixture
def dev(tmp_path: Path) -> Path:
    """Two GPUs as plain files."""
    folder = tmp_path / "dev"
    folder.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (folder / name).write_bytes(bytes(4096))
    return folder


@pytest.fixture
def python(library: Path, dev: Path) -> Callable[..., Any]:
    """Run a script over the stand-in library, in a Python of its own: the loader reads its paths at the start.

    The script prints one line of JSON; keywords are settings of the stand-in.
    """

    def run(script: str, *arguments: object, **settings: object) -> Any:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("CUDA_", "FAKE_"))}
        environment.update(LD_LIBRARY_PATH=str(library), FAKE_NVML_DEV_DIR=str(dev), FAKE_NVML_CONF="/dev/null")
        environment.update({"FAKE_NVML_" + key: str(value) for key, value in settings.items()})
        environment["PYTHONPATH"] = str(ROOT / ".collections")
        words = [sys.executable, "-c", script, *(str(argument) for argument in arguments)]
        done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, timeout=60, check=True)
        return json.loads(done.stdout)

    return run
