# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""GPUs and their device nodes: what lies in C(/dev), what NVML knows, and which of it is meant.

Facts used (NVIDIA/open-gpu-kernel-modules nv-chardev-numbers.h, uvm.c; proc(5)): GPU nodes have major 195, listed in
C(/proc/devices) as nvidia or nvidia-frontend; the majors of nvidia-uvm and nvidia-caps are given out at boot, so that a
container may keep nodes of an earlier boot; C(nvidiaN) is the minor number, not NVML's index; the minors of
C(nvidia-caps) belong to GPUs as C(/proc/driver/nvidia-caps/mig-minors) says.
"""

from __future__ import annotations

import dataclasses
import os
import re
import stat as st
import typing as t

from ..common.errors import CleanslateError
from ..common.text import show
from ..proc.scan import Key, Stat, key_of
from .nvml import NvmlGpu, NvmlSnapshot

REAL = "/dev"
_GPU_NODE = re.compile(r"nvidia(\d+)")
_CAP_NODE = re.compile(r"nvidia-cap(\d+)")
_CONTROL = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")
#: Names under which /proc/devices lists the major number of each kind of node.
_MAJORS = {
    "gpu": ("nvidia", "nvidia-frontend", "nvidiactl"),
    "nvidiactl": ("nvidia", "nvidia-frontend", "nvidiactl"),
    "nvidia-uvm": ("nvidia-uvm",),
    "nvidia-uvm-tools": ("nvidia-uvm",),
    "nvidia-caps": ("nvidia-caps",),
}
_MIG_MINOR = re.compile(r"^gpu(\d+)/\S+ (\d+)$", re.MULTILINE)
_PCI = re.compile(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class Node:
    path: str
    key: Key
    #: N of nvidiaN; None for control nodes.
    minor: int | None = None


@dataclasses.dataclass(frozen=True)
class Stale:
    """Something in the folder of nodes that is not what its name says."""

    path: str
    why: str
    minor: int | None = None


@dataclasses.dataclass(eq=False)
class Gpu:
    #: NVML's index; by PCI address or minor where NVML is blind.
    index: int
    uuid: str = ""
    pci: str = ""
    minor: int | None = None
    name: str = ""
    node: Node | None = None
    #: Whoever holds one of these holds this GPU: its node, and those of its MIG devices.
    keys: frozenset[Key] = frozenset()
    selected: bool = True
    #: What NVML says of it, None where NVML is blind.
    nvml: NvmlGpu | None = None
    #: NVML sees it, but this machine or container may not use it: it has no node here.
    hidden: bool = False

    @property
    def label(self) -> str:
        return "GPU %d" % self.index

    def __repr__(self) -> str:
        return "Gpu(index=%d, minor=%s, uuid=%r)" % (self.index, self.minor, self.uuid)


@dataclasses.dataclass
class Devices:
    dev_dir: str
    #: Plain files count as nodes: nothing here is hardware.
    simulated: bool
    gpus: list[Gpu] = dataclasses.field(default_factory=list)
    #: nvidiactl and uvm: for the whole machine, for no single GPU.
    control: list[Node] = dataclasses.field(default_factory=list)
    stale: list[Stale] = dataclasses.field(default_factory=list)
    #: How many nvidiaN there are.
    node_count: int = 0
    #: Whether GPUs are known by index and UUID, not only by node.
    identified: bool = True
    labels: dict[Key, str] = dataclasses.field(default_factory=dict)

    @property
    def selected(self) -> list[Gpu]:
        return [gpu for gpu in self.gpus if gpu.selected]

    @property
    def keys(self) -> frozenset[Key]:
        """Everything worth looking for."""
        return frozenset(self.labels)

    def find(self, name: str) -> Gpu | None:
        """The GPU of this index, UUID (its own or that of one of its MIG devices) or PCI bus id."""
        return find(self.gpus, name)


@dataclasses.dataclass(frozen=True)
class Nodes:
    """What the folder of nodes holds, before NVML was asked."""

    dev_dir: str
    simulated: bool
    gpus: tuple[Node, ...]
    control: tuple[Node, ...]
    #: MIG capability nodes by the minor of their GPU; None: of which GPU is not known.
    caps: t.Mapping[int | None, tuple[Node, ...]]
    stale: tuple[Stale, ...]

    @property
    def labels(self) -> dict[Key, str]:
        caps = [node for nodes in self.caps.values() for node in nodes]
        return {node.key: node.path for node in [*self.control, *caps, *self.gpus]}

    @property
    def names(self) -> dict[str, Key]:
        """Base names by which a mapped node is known where it cannot be looked at any more."""
        return {os.path.basename(node.path): node.key for node in [*self.control, *self.gpus]}


def parse_pci(text: str) -> tuple[int, int, int, int] | None:
    """C(00000000:1B:00.0), C(0000:1b:00.0) and C(1b:00.0) are one address; None when it is none."""
    match = _PCI.fullmatch(text.strip())
    if match is None:
        return None
    return int(match.group(1) or "0", 16), int(match.group(2), 16), int(match.group(3), 16), int(match.group(4))


def find(gpus: t.Iterable[Gpu], name: str) -> Gpu | None:
    name = name.strip()
    pci = parse_pci(name)
    for gpu in gpus:
        if name.isdigit():
            if gpu.index == int(name):
                return gpu
        elif pci is not None:
            if parse_pci(gpu.pci) == pci:
                return gpu
        elif name and name.lower() in [uuid.lower() for uuid in uuids(gpu)]:
            return gpu
    return None


def uuids(gpu: Gpu) -> list[str]:
    """Its UUID and those of its MIG devices."""
    mig = gpu.nvml.mig if gpu.nvml and gpu.nvml.mig else ()
    return [uuid for uuid in [gpu.uuid, *(device["uuid"] for device in mig)] if uuid]


def parse_majors(text: str) -> dict[str, set[int]]:
    """The character devices of C(/proc/devices): name -> major numbers."""
    out: dict[str, set[int]] = {}
    for line in text.partition("Block devices")[0].splitlines():
        number, _sep, name = line.strip().partition(" ")
        if number.isdigit() and name:
            out.setdefault(name, set()).add(int(number))
    return out


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as handle:
            return handle.read()
    except OSError:
        return ""


class _Finder:
    def __init__(self, dev_dir: str, proc: str, simulated: bool, stat: Stat) -> None:
        self.dev_dir = dev_dir
        self.simulated = simulated
        self.stat = stat
        self.majors = parse_majors(_read(os.path.join(proc, "devices")))
        self.mig = {
            int(cap): int(gpu)
            for gpu, cap in _MIG_MINOR.findall(_read(os.path.join(proc, "driver/nvidia-caps/mig-minors")))
        }
        self.stale: list[Stale] = []

    def node(self, name: str, kind: str, minor: int | None = None) -> Node | None:
        """One node, None (and noted) when it is not what its name says."""
        path = os.path.join(self.dev_dir, name)
        try:
            status = self.stat(path)
        except FileNotFoundError:
            if os.path.islink(path):
                self.stale.append(Stale(path, "is a link that leads nowhere", minor))
            return None
        except OSError as error:
            self.stale.append(Stale(path, "cannot be looked at: %s" % os.strerror(error.errno or 0), minor))
            return None
        key = key_of(status)
        if key is None or st.S_ISSOCK(status.st_mode):
            self.stale.append(Stale(path, "is neither a device node nor a file", minor))
            return None
        if not self.simulated:
            if key[0] != "c":
                self.stale.append(
                    Stale(path, "is a plain file (something wrote to the path while there was no node)", minor)
                )
                return None
            why = self._outdated(status.st_rdev, kind, minor)
            if why:
                self.stale.append(Stale(path, why, minor))
        return Node(path, key, minor)

    def _outdated(self, number: int, kind: str, minor: int | None) -> str:
        known: set[int] = set().union(*(self.majors.get(name, set()) for name in _MAJORS[kind]))
        if not any(name.startswith("nvidia") for name in self.majors):
            return ""  # no driver: NVML will say so; the stand-ins of a test machine have numbers of their own
        if os.major(number) not in known:
            wanted = " or ".join(str(major) for major in sorted(known)) or "none"
            return "has major number %d, the driver's in /proc/devices is %s" % (os.major(number), wanted)
        if kind == "gpu" and os.minor(number) != minor:
            return "has minor number %d" % os.minor(number)
        return ""

    def all(self) -> Nodes:
        try:
            names = sorted(os.listdir(self.dev_dir))
        except OSError as error:
            raise CleanslateError(
                "dev_dir: %s cannot be listed (%s). Name the folder of the device nodes, normally /dev."
                % (show(self.dev_dir), os.strerror(error.errno or 0))
            ) from None
        gpus = []
        for name in names:
            match = _GPU_NODE.fullmatch(name)
            if match:
                gpus.append(self.node(name, "gpu", int(match.group(1))))
        control = [self.node(name, name) for name in _CONTROL if name in names]
        caps: dict[int | None, list[Node]] = {}
        folder = os.path.join(self.dev_dir, "nvidia-caps")
        for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
            match = _CAP_NODE.fullmatch(name)
            # 1 and 2 are the rights to configure and to monitor MIG: every CUDA process has them open.
            if match and int(match.group(1)) > 2:
                node = self.node(os.path.join("nvidia-caps", name), "nvidia-caps")
                if node is not None:
                    caps.setdefault(self.mig.get(int(match.group(1))), []).append(node)
        return Nodes(
            self.dev_dir,
            self.simulated,
            tuple(sorted((node for node in gpus if node is not None), key=lambda node: node.minor or 0)),
            tuple(node for node in control if node is not None),
            {minor: tuple(nodes) for minor, nodes in caps.items()},
            tuple(self.stale),
        )


def is_simulated(dev_dir: str) -> bool:
    """Whether this folder lies outside C(/dev), so that plain files in it stand for GPUs."""
    real = os.path.realpath(dev_dir)
    return real != REAL and not real.startswith(REAL + "/")


def find_nodes(dev_dir: str, proc: str = "/proc", simulated: bool | None = None, stat: Stat = os.stat) -> Nodes:
    """The nodes in C(dev_dir). Outside C(/dev) plain files count as nodes, and the result is simulated.

    Raises CleanslateError when the folder cannot be listed.
    """
    if simulated is None:
        simulated = is_simulated(dev_dir)
    return _Finder(dev_dir, proc, simulated, stat).all()


def driver_gpus(proc: str = "/proc") -> list[NvmlGpu]:
    """GPUs as the kernel module lists them, in the order of their PCI addresses: what is left when NVML is blind.

    Source: C(/proc/driver/nvidia/gpus/ADDRESS/information), fields Model, GPU UUID and Device Minor.
    """
    folder = os.path.join(proc, "driver/nvidia/gpus")
    out: list[NvmlGpu] = []
    for address in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        fields = {}
        for line in _read(os.path.join(folder, address, "information")).splitlines():
            name, _sep, value = line.partition(":")
            fields[name.strip()] = value.strip()
        minor = fields.get("Device Minor", "")
        uuid = fields.get("GPU UUID", "")
        out.append(
            NvmlGpu(
                index=len(out),
                uuid=uuid if "?" not in uuid else "",
                pci=address,
                minor=int(minor) if minor.isdigit() else None,
                name=fields.get("Model", ""),
            )
        )
    return out


def combine(nodes: Nodes, nvml: NvmlSnapshot, proc: str = "/proc") -> Devices:
    """Join nodes and what NVML knows into GPUs."""
    by_minor = {node.minor: node for node in nodes.gpus}
    everywhere = nodes.caps.get(None, ())
    known: t.Sequence[NvmlGpu] = nvml.gpus if nvml.ok else ([] if nodes.simulated else driver_gpus(proc))
    gpus: list[Gpu] = []
    lost: list[NvmlGpu] = []
    for seen in known:
        if seen.minor is None and seen.error is not None:
            lost.append(seen)
            continue
        gpus.append(_gpu(seen, by_minor.pop(seen.minor, None), nodes, everywhere, nvml.ok))
    # NVML gives no minor number of a GPU whose handle fails. Where as many nodes are left, they are theirs.
    left = [by_minor.pop(minor) for minor in sorted(m for m in by_minor if m is not None)]
    for seen in lost:
        node = left.pop(0) if len(left) >= sum(1 for other in lost if other.index >= seen.index) else None
        gpus.append(_gpu(seen, node, nodes, everywhere, nvml.ok))
    index = 1 + max((gpu.index for gpu in gpus), default=-1)
    for node in left:
        gpus.append(_gpu(NvmlGpu(index=index, minor=node.minor), node, nodes, everywhere, False))
        index += 1
    for gpu in gpus:
        # Seen, refused, and without a node: given to somebody else by the administrator (error 4 or 17).
        denied = gpu.nvml is not None and gpu.nvml.error is not None and gpu.nvml.error.code in (4, 17)
        gpu.hidden = denied and gpu.node is None
    gpus.sort(key=lambda gpu: gpu.index)
    return Devices(
        nodes.dev_dir,
        nodes.simulated,
        gpus,
        list(nodes.control),
        list(nodes.stale),
        node_count=len(nodes.gpus),
        identified=nvml.ok or bool(known),
        labels=nodes.labels,
    )


def _gpu(known: NvmlGpu, node: Node | None, nodes: Nodes, everywhere: tuple[Node, ...], seen: bool) -> Gpu:
    minor = known.minor if known.minor is not None else (node.minor if node else None)
    own = nodes.caps.get(minor, ()) if minor is not None else ()
    keys = frozenset(other.key for other in [*([node] if node else []), *own, *everywhere])
    return Gpu(
        known.index,
        known.uuid,
        known.pci,
        minor,
        known.name,
        node,
        keys,
        nvml=known if seen else None,
    )


def select(devices: Devices, names: t.Sequence[str]) -> None:
    """Mark the GPUs that option C(devices) means; all when it is empty. Raises CleanslateError on an unknown one."""
    if not names:
        return
    chosen = []
    for name in names:
        gpu = devices.find(name)
        if gpu is None:
            there = ", ".join(
                "%d (%s)" % (gpu.index, " ".join(x for x in (gpu.uuid, gpu.pci) if x) or "nvidia%s" % gpu.minor)
                for gpu in devices.gpus
            )
            raise CleanslateError(
                "devices: there is no GPU %r here. Name one by NVML index, UUID or PCI bus id; here are: %s."
                % (show(name), there or "none")
            )
        chosen.append(gpu)
    for gpu in devices.gpus:
        gpu.selected = gpu in chosen
