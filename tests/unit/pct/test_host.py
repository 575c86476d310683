# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is read of a hypervisor and its running containers."""

from __future__ import annotations

import os

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.pct.host import (
    Device,
    Place,
    init_pid,
    look_inside,
    module_version,
    view,
)

from .conftest import Hypervisor


def test_the_host(hypervisor: Hypervisor) -> None:
    hypervisor.node("dev/nvidia-caps/nvidia-cap1", 237, 1, 0o444)
    host, guests = view(hypervisor.place)
    assert (host.node, host.version) == ("pve1", "580.159.04")
    assert host.devices["/dev/nvidia1"] == Device("c", 195, 1, 0o666)
    assert host.devices["/dev/nvidia-caps/nvidia-cap1"].numbers == "c 237:1"
    assert host.wanted_majors("/dev/nvidia-uvm") == {511}
    assert host.wanted_majors("/dev/dri/card0") is None
    assert host.names_of(238) == ["media"]
    # Templates are left out.
    assert [(guest.vmid, guest.running) for guest in guests] == [(129, True), (130, False), (131, True)]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n", "550.54.14"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release Build\n", "580.95.05"),
        ("something else\n", "570.1.2"),
    ],
)
def test_the_module_s_version(hypervisor: Hypervisor, text: str, version: str) -> None:
    hypervisor.write("proc/driver/nvidia/version", text)
    hypervisor.write("sys/module/nvidia/version", "570.1.2\n")
    assert module_version(hypervisor.place) == version


def test_no_module(tmp_path: os.PathLike[str]) -> None:
    assert module_version(Place(str(tmp_path))) == ""


def test_not_a_proxmox_node(tmp_path: os.PathLike[str]) -> None:
    with pytest.raises(CleanslateError, match="no Proxmox VE node"):
        view(Place(str(tmp_path)))


@pytest.mark.parametrize("folder", ["init.scope", ".", "openrc.sshd"])
def test_process_1_of_a_container(hypervisor: Hypervisor, folder: str) -> None:
    hypervisor.run_guest(129, 5000, folder)
    assert init_pid(hypervisor.place, 129) == 5000
    assert init_pid(hypervisor.place, 131) is None


def test_a_running_container(hypervisor: Hypervisor) -> None:
    root = hypervisor.run_guest(129, 5000)
    hypervisor.node(f"{root}/dev/nvidia0", 195, 0)
    hypervisor.node(f"{root}/dev/nvidia-uvm", 509, 0)
    hypervisor.write(f"{root}/dev/nvidiactl", "oops\n")
    libraries = hypervisor.root / root / "usr/lib/x86_64-linux-gnu"
    libraries.mkdir(parents=True)
    for version in ("550.54.14", "580.159.04"):
        (libraries / f"libnvidia-ml.so.{version}").touch()
    (libraries / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.550.54.14")
    (libraries / "libcuda.so.1").touch()
    _host, guests = view(hypervisor.place)
    inside = guests[0].inside
    assert inside is not None
    assert {path: device.numbers for path, device in inside.devices.items() if device.is_node} == {
        "/dev/nvidia0": "c 195:0",
        "/dev/nvidia-uvm": "c 509:0",
    }
    assert inside.devices["/dev/nvidiactl"].kind == "file"
    assert "/dev/nvidia1" not in inside.devices
    assert (inside.libraries, inside.linked, inside.has_library) == (("550.54.14", "580.159.04"), "550.54.14", True)


def test_links_of_the_container_lead_nowhere(hypervisor: Hypervisor) -> None:
    """A container may make any link; none may lead to what is the host's."""
    root = hypervisor.root / hypervisor.run_guest(129, 5000)
    (root / "usr").mkdir()
    (hypervisor.root / "usr/lib").mkdir(parents=True)
    (hypervisor.root / "usr/lib/libcuda.so.1.2.3").touch()
    (root / "usr/lib").symlink_to(hypervisor.root / "usr/lib")
    (root / "dev/nvidia0").symlink_to(hypervisor.root / "dev/nvidia0")
    (root / "dev/sub").symlink_to(hypervisor.root / "dev")
    inside = look_inside(hypervisor.place, 5000, ["/dev/nvidia0", "/dev/sub/nvidia0"])
    assert inside is not None
    assert {path: device.kind for path, device in inside.devices.items()} == {"/dev/nvidia0": "other"}
    assert not inside.has_library


def test_a_container_that_just_ended(hypervisor: Hypervisor) -> None:
    assert look_inside(hypervisor.place, 4242, ["/dev/nvidia0"]) is None


def test_no_descriptor_stays_open(hypervisor: Hypervisor) -> None:
    hypervisor.run_guest(129, 5000)
    before = len(os.listdir("/proc/self/fd"))
    view(hypervisor.place)
    assert len(os.listdir("/proc/self/fd")) == before
