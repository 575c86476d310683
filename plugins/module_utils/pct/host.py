# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""What a hypervisor and its running containers really have: device numbers, the kernel module, the guests' libraries.

Facts: C(/proc/devices) names the major number of each driver; those of nvidia-uvm and nvidia-caps are given out when
the module is loaded and move across reboots, from the kernel's dynamic ranges 234-254 and 384-511
(Documentation/admin-guide/devices.txt); C(/proc/driver/nvidia/version) has the module's version, and the library has
its own in its file's name, C(libnvidia-ml.so.580.159.04); NVML refuses to work when the two differ (error 18). Proxmox
VE puts container 129 into the cgroup C(/lxc/129/ns). A container's files are reached through C(/proc/PID/root).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import stat as st
import typing as t

from ..common.errors import CleanslateError
from ..common.text import show
from ..gpu.devices import parse_majors
from .cluster import running_here
from .conf import GuestConf, parse_conf
from .devices import Handed, handed

#: Names in /proc/devices of the driver of each kind of node.
_DRIVERS = (
    (re.compile(r"/dev/nvidia(?:[0-9]+|ctl|-modeset)"), ("nvidia", "nvidia-frontend", "nvidiactl", "nvidia-modeset")),
    (re.compile(r"/dev/nvidia-uvm(?:-tools)?"), ("nvidia-uvm",)),
    (re.compile(r"/dev/nvidia-caps/.+"), ("nvidia-caps",)),
    (re.compile(r"/dev/nvidia-caps-imex-channels/.+"), ("nvidia-caps-imex-channels",)),
)
_MODULE = re.compile(r"Kernel Module(?: for \S+)?\s+([0-9]+(?:\.[0-9]+)+)", re.ASCII)
_LIBRARY = re.compile(r"lib(?:nvidia-ml|cuda)\.so\.([0-9]+(?:\.[0-9]+)+)", re.ASCII)
#: Where distributions and NVIDIA's installer put libraries; /lib is a link to /usr/lib everywhere that matters.
_LIBRARY_FOLDERS = (
    *("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/lib"),
    *("usr/lib/x86_64-linux-gnu/nvidia/current", "usr/lib/aarch64-linux-gnu/nvidia/current"),
    *("usr/local/lib", "usr/local/lib64", "usr/local/nvidia/lib64"),
)

Stat = t.Callable[..., os.stat_result]


@dataclasses.dataclass(frozen=True)
class Device:
    """What stands at a path. C(kind) is C(c), C(b), C(folder), C(file) or C(other)."""

    kind: str
    major: int = 0
    minor: int = 0
    #: Permission bits.
    mode: int = 0

    @property
    def is_node(self) -> bool:
        return self.kind in ("c", "b")

    @property
    def numbers(self) -> str:
        return "%s %d:%d" % (self.kind, self.major, self.minor)


def device_of(status: os.stat_result) -> Device:
    mode = status.st_mode
    if st.S_ISCHR(mode) or st.S_ISBLK(mode):
        kind = "c" if st.S_ISCHR(mode) else "b"
        return Device(kind, os.major(status.st_rdev), os.minor(status.st_rdev), st.S_IMODE(mode))
    if st.S_ISDIR(mode):
        return Device("folder", mode=st.S_IMODE(mode))
    return Device("file" if st.S_ISREG(mode) else "other", mode=st.S_IMODE(mode))


@dataclasses.dataclass(frozen=True)
class HostView:
    """The hypervisor, as far as passed devices go."""

    node: str
    #: /proc/devices: name -> major numbers of character devices.
    majors: t.Mapping[str, t.Collection[int]]
    #: Version of the loaded kernel module; empty when none is.
    version: str
    #: What stands at each path that some container is given, and at each NVIDIA path; paths without anything lack.
    devices: t.Mapping[str, Device]

    @property
    def has_driver(self) -> bool:
        return any(name.startswith("nvidia") for name in self.majors)

    def names_of(self, major: int) -> list[str]:
        """The drivers that have this major number of character devices."""
        return sorted(name for name, majors in self.majors.items() if major in majors)

    def wanted_majors(self, path: str) -> set[int] | None:
        """Major numbers that an NVIDIA node may have; None where that cannot be told."""
        if not self.has_driver:
            return None
        for pattern, names in _DRIVERS:
            if pattern.fullmatch(path):
                return {major for name in names for major in self.majors.get(name, ())}
        return None


@dataclasses.dataclass(frozen=True)
class InsideView:
    """A running container: what stands at the targets, and the NVIDIA libraries' versions."""

    devices: t.Mapping[str, Device]
    #: Versions in the names of its library files.
    libraries: tuple[str, ...] = ()
    #: The one that libnvidia-ml.so.1 leads to; empty where it leads to none of them.
    linked: str = ""
    #: Whether there is a library at all, also one whose name has no version.
    has_library: bool = False


@dataclasses.dataclass(frozen=True)
class GuestView:
    vmid: int
    conf: GuestConf
    handed: Handed
    #: None when it does not run.
    inside: InsideView | None
    running: bool = False

    @property
    def name(self) -> str:
        return self.conf.name(self.vmid)


class Place:
    """The roots of what is read, so that tests can read a tree of their own."""

    def __init__(self, root: str = "/", stat: Stat = os.stat) -> None:
        self.root = root
        self.stat = stat

    def path(self, path: str) -> str:
        return os.path.join(self.root, path.lstrip("/"))

    def read(self, path: str) -> str:
        """The text of a file; empty when there is none, or when it cannot be read."""
        try:
            with open(self.path(path), encoding="utf-8", errors="replace") as handle:
                return handle.read()
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(self.path(path)))
        except OSError:
            return []

    def device(self, path: str) -> Device | None:
        try:
            return device_of(self.stat(self.path(path)))
        except OSError:
            return None


def conf_path(vmid: int) -> str:
    return "/etc/pve/lxc/%d.conf" % vmid


def guests_here(place: Place) -> list[int]:
    """Ids of the containers of this node. Raises CleanslateError where there is no Proxmox VE."""
    folder = place.path("/etc/pve/lxc")
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise CleanslateError(
            "/etc/pve/lxc cannot be listed (%s): this is no Proxmox VE node, its cluster file system is down, or the "
            "login is not root. Name hypervisors, and become root there." % os.strerror(error.errno or 0)
        ) from None
    found = (re.fullmatch(r"([1-9][0-9]*)\.conf", name, re.ASCII) for name in names)
    return sorted(int(match.group(1)) for match in found if match)


def read_conf(place: Place, vmid: int) -> GuestConf | None:
    """A container's configuration, None when it went away meanwhile. Raises CleanslateError when it cannot be read."""
    try:
        with open(place.path(conf_path(vmid)), encoding="utf-8", errors="surrogateescape") as handle:
            return parse_conf(handle.read())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CleanslateError(
            "%s cannot be read (%s). Become root on the hypervisor." % (conf_path(vmid), os.strerror(error.errno or 0))
        ) from None


def view(place: Place) -> tuple[HostView, list[GuestView]]:
    """The hypervisor and all its containers but templates. Raises CleanslateError as guests_here does."""
    running = running_here(place.read("/proc/net/unix"))
    read: list[tuple[int, GuestConf, Handed]] = []
    for vmid in guests_here(place):
        conf = read_conf(place, vmid)
        if conf is not None and not conf.template:
            read.append((vmid, conf, handed(conf)))
    paths = {device.source for _vmid, _conf, given in read for device in given.devices} | set(nvidia_paths(place))
    stood = [(path, place.device(path)) for path in sorted(paths)]
    host = HostView(
        place.read("/proc/sys/kernel/hostname").strip().split(".")[0],
        parse_majors(place.read("/proc/devices")),
        module_version(place),
        {path: device for path, device in stood if device is not None},
    )
    guests = []
    for vmid, conf, given in read:
        pid = init_pid(place, vmid) if vmid in running and given.devices else None
        inside = look_inside(place, pid, [device.target for device in given.devices]) if pid is not None else None
        guests.append(GuestView(vmid, conf, given, inside, vmid in running))
    return host, guests


def nvidia_paths(place: Place) -> list[str]:
    """Everything below /dev that is NVIDIA's, as paths from the root."""
    out = []
    for name in place.names("/dev"):
        if name.startswith("nvidia"):
            path = "/dev/" + name
            out += ["%s/%s" % (path, below) for below in place.names(path)] or [path]
    return out


def module_version(place: Place) -> str:
    match = _MODULE.search(place.read("/proc/driver/nvidia/version"))
    return match.group(1) if match else place.read("/sys/module/nvidia/version").strip()


# -- inside a running container ------------------------------------------------------------------------------------


def init_pid(place: Place, vmid: int) -> int | None:
    """The host's pid of a container's process 1; None when it is not found, as when it just ended."""
    top = "/sys/fs/cgroup/lxc/%d/ns" % vmid
    for folder in (top + "/init.scope", top, *(top + "/" + name for name in place.names(top))):
        for pid in sorted(int(word) for word in place.read(folder + "/cgroup.procs").split() if word.isdigit()):
            match = re.search(r"^NSpid:(?:\s+[0-9]+)*\s+([0-9]+)$", place.read("/proc/%d/status" % pid), re.MULTILINE)
            if match and match.group(1) == "1":
                return pid
    return None


def _open_below(root: int, path: str) -> int | None:
    """A folder below an open one, entered name by name without following links: they are the container's to make."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    current = os.dup(root)
    for name in path.split("/"):
        if not name:
            continue
        try:
            following = os.open(name, flags, dir_fd=current)
        except OSError:
            os.close(current)
            return None
        os.close(current)
        current = following
    return current


def look_inside(place: Place, pid: int, targets: t.Iterable[str]) -> InsideView | None:
    """What a running container has; None when it ended meanwhile. Opens no file and follows no link of the guest's."""
    try:
        root = os.open(place.path("/proc/%d/root" % pid), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        devices: dict[str, Device] = {}
        for target in targets:
            folder = _open_below(root, os.path.dirname(target))
            if folder is None:
                continue
            with contextlib.suppress(OSError):
                status = place.stat(os.path.basename(target), dir_fd=folder, follow_symlinks=False)
                devices[target] = device_of(status)
            os.close(folder)
        return _libraries(root, devices)
    finally:
        os.close(root)


def _libraries(root: int, devices: t.Mapping[str, Device]) -> InsideView:
    versions: set[str] = set()
    linked, any_library = "", False
    for path in _LIBRARY_FOLDERS:
        folder = _open_below(root, path)
        if folder is None:
            continue
        for name in os.listdir(folder):
            if not name.startswith(("libnvidia-ml.so", "libcuda.so")):
                continue
            any_library = True
            match = _LIBRARY.fullmatch(name)
            if match:
                versions.add(match.group(1))
            if name == "libnvidia-ml.so.1" and not linked:
                with contextlib.suppress(OSError):
                    match = _LIBRARY.fullmatch(os.path.basename(os.readlink(name, dir_fd=folder)))
                    linked = match.group(1) if match else ""
        os.close(folder)
    return InsideView(devices, tuple(sorted(versions)), show(linked), any_library)
