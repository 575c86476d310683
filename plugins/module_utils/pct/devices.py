# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""The devices that a container's configuration hands to it, and the device rules that let it use them.

Facts: C(devN:) makes a node of its own in the container and allows it (pve-container 5.0.5, PVE::LXC
update_lxc_config); C(lxc.mount.entry) is a line of fstab(5), source and target first, whose target counts from the
container's root and has no leading slash (lxc.container.conf(5), MOUNT POINTS; an absolute one is ignored, conf.c
mount_entry_on_absolute_rootfs); it needs a matching C(lxc.cgroup2.devices.allow), since Proxmox VE denies all devices
but the usual ones; rules of C(lxc.cgroup.devices) are those of cgroup version 1, which Proxmox VE 8 and 9 do not have.
"""

from __future__ import annotations

import dataclasses
import re
import typing as t

from .conf import GuestConf

_DEV = re.compile(r"dev([0-9]+)", re.ASCII)
_GPU = re.compile(r"/dev/nvidia([0-9]+)", re.ASCII)
_ESCAPE = re.compile(r"\\([0-7]{3})", re.ASCII)
_RULE = re.compile(r"([abc])(?:\s+(\*|[0-9]+):(\*|[0-9]+)(?:\s+([rwm]{1,3}))?)?", re.ASCII)
_RULE_KEY = re.compile(r"lxc\.cgroup(2?)\.devices\.(allow|deny)")


@dataclasses.dataclass(frozen=True)
class Passed:
    """One device, or folder of devices, that a line hands to the container."""

    index: int
    #: The line as it stands in the file.
    line: str
    #: C(dev) or C(mount).
    kind: str
    #: On the host and in the container, both from the root: C(/dev/nvidia0).
    source: str
    target: str
    #: For C(dev) its properties, for C(mount) the mount options.
    options: t.Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: Whether the target was written with a leading slash, so that LXC ignores the line.
    absolute: bool = False

    @property
    def optional(self) -> bool:
        """Whether the container starts without the source."""
        return self.kind == "mount" and "optional" in self.options

    @property
    def gpu(self) -> int | None:
        """N of C(/dev/nvidiaN), None for every other device."""
        match = _GPU.fullmatch(self.source)
        return int(match.group(1)) if match else None

    @property
    def nvidia(self) -> bool:
        return self.source.startswith("/dev/nvidia")


@dataclasses.dataclass(frozen=True)
class Rule:
    """One line about a device rule. C(major) and C(minor) None mean all."""

    index: int
    line: str
    allow: bool
    #: Of cgroup version 2, the one that works.
    current: bool
    kind: str = "a"
    major: int | None = None
    minor: int | None = None
    access: str = "rwm"

    def covers(self, kind: str, major: int, minor: int, access: str) -> bool:
        return (
            self.kind in ("a", kind)
            and self.major in (None, major)
            and self.minor in (None, minor)
            and all(letter in self.access for letter in access)
        )


@dataclasses.dataclass(frozen=True)
class Handed:
    """All that a configuration says about devices."""

    devices: tuple[Passed, ...]
    rules: tuple[Rule, ...]
    #: Index and text of the lines about devices that mean nothing.
    broken: tuple[tuple[int, str], ...]
    #: Whether a hook of the NVIDIA container toolkit hands out GPUs by itself.
    hook: bool

    @property
    def gpus(self) -> list[int]:
        """N of each C(/dev/nvidiaN) that is handed over."""
        return sorted({device.gpu for device in self.devices if device.gpu is not None})

    @property
    def sources(self) -> list[str]:
        """Paths on the host, each once, in the order of the file."""
        return list(dict.fromkeys(device.source for device in self.devices))

    def allowed(self, kind: str, major: int, minor: int, access: str = "rw") -> bool:
        """Whether the rules let the container open this device number; of several that match the last one counts."""
        answer = False
        for rule in self.rules:
            if not rule.current:
                continue
            if rule.allow:
                answer = answer or rule.covers(kind, major, minor, access)
            elif any(rule.covers(kind, major, minor, letter) for letter in access):
                answer = False
        return answer


def _unescape(field: str) -> str:
    """fstab(5) writes a space as C(\\040)."""
    return _ESCAPE.sub(lambda match: chr(int(match.group(1), 8)), field)


def _collapse(path: str) -> str:
    return re.sub(r"/+", "/", path)


def _dev(index: int, line: str, value: str) -> Passed | None:
    options: dict[str, str] = {}
    for number, part in enumerate(value.split(",")):
        key, equals, rest = part.strip().partition("=")
        if not equals and number == 0:
            key, rest = "path", key
        options[key] = rest
    path = _collapse(options.pop("path", ""))
    if not path.startswith("/dev/"):
        return None
    return Passed(index, line, "dev", path, path, options)


def _mount(index: int, line: str, value: str) -> Passed | None:
    fields = [_unescape(field) for field in value.split()]
    if len(fields) < 2:
        return None
    options: dict[str, str] = {}
    for part in fields[3].split(",") if len(fields) > 3 else ():
        key, _equals, rest = part.partition("=")
        options[key] = rest
    absolute = fields[1].startswith("/")
    target = _collapse("/" + fields[1])
    return Passed(index, line, "mount", _collapse(fields[0]).rstrip("/") or "/", target, options, absolute)


def _rule(index: int, line: str, version: str, verb: str, value: str) -> Rule | None:
    match = _RULE.fullmatch(value)
    if match is None or (match.group(2) is None and match.group(1) != "a"):
        return None
    major, minor = match.group(2), match.group(3)
    return Rule(
        index,
        line,
        verb == "allow",
        version == "2",
        match.group(1),
        None if major in (None, "*") else int(major),
        None if minor in (None, "*") else int(minor),
        match.group(4) or "rwm",
    )


def handed(conf: GuestConf) -> Handed:
    """What the configuration says about devices: C(devN:), every C(lxc.mount.entry) below C(/dev), every rule."""
    devices: list[Passed] = []
    rules: list[Rule] = []
    broken: list[tuple[int, str]] = []
    hook = False
    for key in sorted((key for key in conf.keys if _DEV.fullmatch(key)), key=lambda key: int(key[3:])):
        index = conf.places[key]
        device = _dev(index, conf.lines[index], conf.keys[key])
        if device is None:
            broken.append((index, conf.lines[index]))
        else:
            devices.append(device)
    for raw in conf.raw:
        line = conf.lines[raw.index]
        match = _RULE_KEY.fullmatch(raw.key)
        if match:
            rule = _rule(raw.index, line, match.group(1), match.group(2), raw.value)
            if rule is None:
                broken.append((raw.index, line))
            else:
                rules.append(rule)
        elif raw.key == "lxc.mount.entry":
            mount = _mount(raw.index, line, raw.value)
            if mount is None:
                broken.append((raw.index, line))
            elif mount.source.startswith("/dev/"):
                devices.append(mount)
        elif raw.key.startswith("lxc.hook.") and "nvidia" in raw.value:
            hook = True
    return Handed(tuple(devices), tuple(rules), tuple(broken), hook)


def shared_gpus(guests: t.Mapping[int, t.Iterable[int]]) -> dict[int, list[int]]:
    """GPU -> the containers that have it, for every GPU that more than one has; C(guests) are those of one node."""
    by_gpu: dict[int, list[int]] = {}
    for vmid in sorted(guests):
        for gpu in guests[vmid]:
            by_gpu.setdefault(gpu, []).append(vmid)
    return {gpu: vmids for gpu, vmids in sorted(by_gpu.items()) if len(vmids) > 1}
