# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""CUDA_VISIBLE_DEVICES of a guest's process, read from the hypervisor: it counts the GPUs that the guest was given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.masks import visible

from ..proctree import ProcTree


def guest(tree: ProcTree, value: str, given: tuple[int, ...]) -> list[int] | None:
    """What the variable names, as indices of this machine."""
    folder = tree.add(70, opens=[tree.gpu(0)], environ={"CUDA_VISIBLE_DEVICES": value})
    for number in given:
        node = Path(str(folder / "root") + str(tree.gpu(number)))
        node.parent.mkdir(parents=True, exist_ok=True)
        os.link(tree.gpu(number), node)
    (folder / "root").mkdir(exist_ok=True)
    with tree.surveyor() as surveyor:
        survey = surveyor.look()
    named = visible(survey.table[70], survey.devices, survey.fs)
    return None if named is None else [gpu.index for gpu in named]


@pytest.mark.parametrize(
    ("value", "given", "named"),
    [
        ("0", (2, 3), [2]),
        ("1", (2, 3), [3]),
        ("1,0", (0, 3), [3, 0]),
        ("0", (0, 1, 2, 3), [0]),
        ("2", (2, 3), []),
        ("0", (), None),
    ],
)
def test_indices_count_what_the_guest_was_given(
    tmp_path: Path, value: str, given: tuple[int, ...], named: list[int] | None
) -> None:
    assert guest(ProcTree(tmp_path, gpus=4), value, given) == named


def test_a_node_of_another_device_under_the_same_name_is_not_given(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path, gpus=4)
    other = Path(str(tree.proc / "70" / "root") + str(tree.gpu(0)))
    other.parent.mkdir(parents=True)
    other.write_bytes(b"")
    assert guest(tree, "0", (1,)) == [1]


def test_only_among_the_given_must_models_be_alike(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path, gpus=4)
    tree.nvml.set(0, name="NVIDIA L4")
    assert guest(tree, "0", (2, 3)) == [2]
