# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Nodes, GPUs without NVML, and names of devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.devices import (
    combine,
    find_nodes,
    is_simulated,
    parse_majors,
    parse_pci,
)
from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.nvml import NvmlSnapshot, fault_of

from ..proctree import ProcTree, uuid

BLIND = NvmlSnapshot(fault=fault_of(9, "Driver Not Loaded"))


@pytest.mark.parametrize("text", ["00000000:1B:00.0", "0000:1b:00.0", "1b:00.0", " 1B:00.0 "])
def test_one_address_has_many_spellings(text: str) -> None:
    assert parse_pci(text) == (0, 0x1B, 0, 0)


@pytest.mark.parametrize("folder", ["/dev", "/dev/", "/dev/shm/gpus", "/dev/../dev"])
def test_what_lies_in_dev_is_no_simulation(folder: str) -> None:
    """Otherwise plain files there would count as GPUs, and processes that may not be looked at would not."""
    assert not is_simulated(folder)


def test_a_link_to_dev_is_dev(tmp_path: Path) -> None:
    (tmp_path / "dev").symlink_to("/dev")
    assert not is_simulated(str(tmp_path / "dev"))
    assert is_simulated(str(tmp_path))
    assert is_simulated("/device")


@pytest.mark.parametrize("text", ["", "0", "1b:00", "1b:00.9", "GPU-1b:00.0", "1b:00.0\nx"])
def test_what_is_no_address_is_none(text: str) -> None:
    assert parse_pci(text) is None


@given(some.text(max_size=200))
def test_no_text_breaks_the_list_of_majors(text: str) -> None:
    for name, numbers in parse_majors(text).items():
        assert name
        assert numbers


def test_block_devices_are_none_of_it() -> None:
    text = "Character devices:\n195 nvidia\n195 nvidiactl\n\nBlock devices:\n195 nvidia-uvm\n"
    assert parse_majors(text) == {"nvidia": {195}, "nvidiactl": {195}}


def test_without_nvml_the_kernel_module_tells_which_gpu_is_which(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path, gpus=2, real=True)
    for address, minor in (("0000:1a:00.0", 1), ("0000:1b:00.0", 0)):
        folder = tree.proc / "driver/nvidia/gpus" / address
        folder.mkdir(parents=True)
        (folder / "information").write_text(
            "Model: \t\t NVIDIA H200\nGPU UUID: \t %s\nDevice Minor: \t %d\n" % (uuid(minor), minor), encoding="utf-8"
        )
    nodes = find_nodes(str(tree.dev), str(tree.proc), simulated=False, stat=tree.stat)
    devices = combine(nodes, BLIND, str(tree.proc))
    assert [(gpu.index, gpu.uuid, gpu.minor) for gpu in devices.gpus] == [(0, uuid(1), 1), (1, uuid(0), 0)]
    assert devices.identified
    assert all(gpu.nvml is None for gpu in devices.gpus)


def test_without_any_source_the_nodes_are_what_there_is(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path, gpus=2)
    devices = combine(find_nodes(str(tree.dev), str(tree.proc)), BLIND, str(tree.proc))
    assert [(gpu.index, gpu.minor, gpu.uuid) for gpu in devices.gpus] == [(0, 0, ""), (1, 1, "")]
    assert devices.simulated
    assert not devices.identified


@pytest.mark.parametrize("kind", ["folder", "dangling", "file"])
def test_among_real_nodes_only_devices_pass(tmp_path: Path, kind: str) -> None:
    tree = ProcTree(tmp_path, gpus=1, real=True)
    path = tree.dev / "nvidia7"
    if kind == "folder":
        path.mkdir()
    elif kind == "dangling":
        path.symlink_to(tmp_path / "nowhere")
    else:
        path.touch()
    nodes = find_nodes(str(tree.dev), str(tree.proc), simulated=False, stat=tree.stat)
    assert [stale.minor for stale in nodes.stale] == [7]
    assert [node.minor for node in nodes.gpus] == [0]


def test_a_node_with_another_minor_number_is_stale(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path, gpus=1, real=True)
    tree.node("nvidia3", 195, 2)
    nodes = find_nodes(str(tree.dev), str(tree.proc), simulated=False, stat=tree.stat)
    assert [(stale.minor, stale.why) for stale in nodes.stale] == [(3, "has minor number 2")]


def test_names_that_only_look_alike_are_no_nodes(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path, gpus=1)
    for name in ("nvidia0x", "nvidia-modeset", "xnvidia1", "nvidia"):
        tree.node(name)
    nodes = find_nodes(str(tree.dev), str(tree.proc))
    assert [node.minor for node in nodes.gpus] == [0]
    assert sorted(nodes.labels.values()) == sorted(
        str(tree.dev / name) for name in ("nvidia0", "nvidiactl", "nvidia-uvm")
    )
