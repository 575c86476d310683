# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A cluster of three nodes in files (pve/), as one of its nodes would read it; a hypervisor's whole tree to change."""

from __future__ import annotations

import os
import shutil
import stat as st
from collections.abc import Callable
from pathlib import Path

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.pct.host import Place

PVE = Path(__file__).parent / "pve"


def reading_of(root: Path) -> str:
    """What `grep -aH ''` prints of these files."""
    places = {path: f"/etc/pve/{path.relative_to(root)}" for path in sorted(root.rglob("*")) if path.is_file()}
    places[root / "unix"] = "/proc/net/unix"
    places[root / "hostname"] = "/proc/sys/kernel/hostname"
    return "".join(
        f"{name}:{line}\n" for path, name in places.items() for line in path.read_text(encoding="utf-8").splitlines()
    )


@pytest.fixture
def reading() -> str:
    return reading_of(PVE)


class Hypervisor:
    """The tree of node pve1: configurations, /proc, /dev with plain files whose numbers `stat` makes up."""

    MAJORS = "Character devices:\n  1 mem\n195 nvidia\n195 nvidiactl\n238 media\n511 nvidia-uvm\n\nBlock devices:\n"

    def __init__(self, root: Path) -> None:
        self.root = root
        #: Paths of the tree -> kind, major, minor, mode.
        self.numbers: dict[str, tuple[str, int, int, int]] = {}
        shutil.copytree(PVE / "nodes", root / "etc/pve/nodes")
        (root / "etc/pve/lxc").symlink_to("nodes/pve1/lxc")
        self.write("proc/devices", self.MAJORS)
        self.write("proc/net/unix", (PVE / "unix").read_text(encoding="utf-8"))
        self.write("proc/sys/kernel/hostname", "pve1\n")
        self.write(
            "proc/driver/nvidia/version",
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (root@host)\nGCC\n",
        )
        for minor in range(4):
            self.node(f"dev/nvidia{minor}", 195, minor)
        self.node("dev/nvidiactl", 195, 255)
        self.node("dev/nvidia-uvm", 511, 0)
        self.place = Place(str(root), self.stat)

    def write(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def node(self, path: str, major: int, minor: int, mode: int = 0o666, kind: str = "c") -> None:
        self.write(path, "")
        self.numbers[path] = (kind, major, minor, mode)

    def remove(self, path: str) -> None:
        (self.root / path).unlink()
        self.numbers.pop(path, None)

    def stat(self, path: str, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
        found = os.stat(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)
        if dir_fd is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), path)
        folder, last = os.path.split(path)
        real = os.path.realpath(path) if follow_symlinks else os.path.join(os.path.realpath(folder), last)
        name = os.path.relpath(real, os.path.realpath(self.root))
        if name not in self.numbers:
            return found
        kind, major, minor, mode = self.numbers[name]
        fields = list(found)
        fields[0] = (st.S_IFCHR if kind == "c" else st.S_IFBLK) | mode
        return os.stat_result(fields, {"st_rdev": os.makedev(major, minor)})

    def conf(self, vmid: int) -> Path:
        return self.root / f"etc/pve/lxc/{vmid}.conf"

    def edit(self, vmid: int, old: str, new: str) -> None:
        text = self.conf(vmid).read_text(encoding="utf-8")
        assert old in text
        self.conf(vmid).write_text(text.replace(old, new), encoding="utf-8")

    def run_guest(self, vmid: int, pid: int, folder: str = "init.scope") -> str:
        """Make a container's process 1; its root, as a path of the tree."""
        self.write(f"sys/fs/cgroup/lxc/{vmid}/ns/{folder}/cgroup.procs", f"{pid + 1}\n{pid}\n")
        self.write(f"proc/{pid}/status", f"Name:\tsystemd\nNSpid:\t{pid}\t1\n")
        self.write(f"proc/{pid + 1}/status", f"Name:\tx\nNSpid:\t{pid + 1}\t77\n")
        (self.root / f"proc/{pid}/root/dev").mkdir(parents=True)
        return f"proc/{pid}/root"


@pytest.fixture
def hypervisor(tmp_path: Path) -> Hypervisor:
    return Hypervisor(tmp_path)


@pytest.fixture
def make_hypervisor(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Hypervisor]:
    return lambda: Hypervisor(tmp_path_factory.mktemp("hypervisor"))
