# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whom a name spares, and whom it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.safe import is_mps, safe_reason
from ansible_collections.cleanslate.inference.plugins.module_utils.proc.table import Process, ProcFS

from ..proctree import ProcTree


@pytest.fixture
def process(tmp_path: Path) -> Any:
    tree = ProcTree(tmp_path)

    def make(comm: str, argv: list[str] | None = None, exe: str | None = None) -> Process:
        tree.add(50, comm=comm, argv=argv, exe=exe)
        return ProcFS(str(tree.proc)).process(50)

    return make


@pytest.mark.parametrize(
    ("comm", "argv", "exe"),
    [
        ("nvidia-persistenced", ["/usr/bin/nvidia-persistenced"], "/usr/bin/nvidia-persistenced"),
        ("nvidia-persistenced", ["nvidia-persistenced"], None),
        ("nv-fabricmanager", ["/usr/bin/nv-fabricmanager", "-c", "x"], "/usr/bin/nv-fabricmanager"),
        ("nvidia-smi", ["nvidia-smi", "dmon"], "/usr/bin/nvidia-smi (deleted)"),
        ("Xorg", ["/usr/lib/xorg/Xorg"], "/usr/lib/xorg/Xorg"),
        ("kvm", ["/usr/bin/kvm", "-id", "100"], "/usr/bin/qemu-system-x86_64"),
        ("qemu-system-x86_64", ["qemu-system-x86_64"], "/usr/bin/qemu-system-x86_64"),
        ("nvitop", ["/usr/bin/python3", "/usr/local/bin/nvitop"], "/usr/bin/python3.12"),
        ("nvsm_core", ["nvsm_core"], "/usr/bin/nvsm_core"),
        ("nvidia-cuda-mps-server", ["nvidia-cuda-mps-server"], "/usr/bin/nvidia-cuda-mps-server"),
    ],
)
def test_real_ones_are_spared(process: Any, comm: str, argv: list[str], exe: str | None) -> None:
    assert safe_reason(process(comm, argv, exe))


@pytest.mark.parametrize(
    ("comm", "argv", "exe"),
    [
        ("python3", ["python3", "/opt/dcgm-exporter-report/train.py"], "/usr/bin/python3.12"),
        ("python3", ["python3", "train.py", "nvidia-smi"], "/usr/bin/python3.12"),
        ("nvidia-smi", ["nvidia-smi"], "/home/u/miner"),
        ("nvidia-smi", ["nvidia-smi"], "/usr/bin/python3.12"),
        ("nvitop", ["nvitop"], "/usr/bin/python3.12"),
        ("nvidia-smi-fake", ["nvidia-smi-fake"], "/usr/bin/nvidia-smi-fake"),
        ("nvidia-persiste", ["nvidia-persistently-mining"], "/x/nvidia-persistently-mining"),
        ("my-Xorg", ["my-Xorg"], "/usr/bin/my-Xorg"),
        ("Xorgx", ["Xorg"], "/usr/bin/Xorg"),
        ("nvsmining", ["nvsmining"], "/usr/bin/nvsmining"),
        ("sglang::scheduler_TP0", ["sglang::scheduler_TP0"], "/usr/bin/python3.12"),
        ("cleanslate-nvml", ["miner"], "/home/u/miner"),
    ],
)
def test_a_part_of_a_name_or_a_borrowed_one_spares_nobody(
    process: Any, comm: str, argv: list[str], exe: str | None
) -> None:
    assert safe_reason(process(comm, argv, exe)) is None


@pytest.mark.parametrize(
    ("name", "spared"),
    [
        ("train.py", True),
        ("python3", True),
        ("python3.12", True),
        ("train", False),
        ("rain.py", False),
        ("/srv/train.py", False),
        ("", False),
    ],
)
def test_protect_takes_whole_names(process: Any, name: str, spared: bool) -> None:
    found = safe_reason(process("python3", ["python3", "/srv/train.py"], "/usr/bin/python3.12"), [name])
    assert bool(found) is spared


def test_a_title_can_be_protected(process: Any) -> None:
    titled = process("sglang::scheduler_TP0", ["sglang::scheduler_TP0"], "/usr/bin/python3.12")
    assert safe_reason(titled, ["sglang::scheduler_TP0"]) == "named in protect"


def test_the_mps_daemon_is_told_apart(process: Any) -> None:
    assert is_mps(process("nvidia-cuda-mps-control", ["nvidia-cuda-mps-control", "-d"]))


def test_another_runs_look_is_spared(process: Any) -> None:
    assert safe_reason(process("cleanslate-nvml", ["/usr/bin/python3"], "/usr/bin/python3.12"))
