# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""What is wrong with the devices that containers are given, and which lines would be right.

Pure: views in, findings out.
"""

from __future__ import annotations

import dataclasses
import typing as t

from ..common.text import show
from .conf import Edit, edited, parse_conf
from .devices import Passed, Rule, handed, shared_gpus
from .host import Device, GuestView, HostView

ERROR, WARNING = "error", "warning"
#: What every program that uses a GPU opens beside it.
_CONTROL = ("/dev/nvidiactl", "/dev/nvidia-uvm")
_ALLOW = "lxc.cgroup2.devices.allow"
#: A later version of the rules is wrong no more once all edits of a round are made; each round mends at least one line.
_ROUNDS = 8


@dataclasses.dataclass(frozen=True)
class Finding:
    code: str
    severity: str
    #: None when it is the host's own.
    vmid: int | None
    #: What is wrong and what to change, in whole sentences.
    msg: str
    path: str = ""
    #: Lines of the configuration that would mend it; empty where no line can.
    edits: tuple[Edit, ...] = ()

    @property
    def fixable(self) -> bool:
        return bool(self.edits)

    def data(self, lines: t.Sequence[str] = ()) -> dict[str, t.Any]:
        """As modules return it; C(lines) are those of the configuration that the edits are about."""
        return {
            "code": self.code,
            "severity": self.severity,
            "vmid": self.vmid,
            "path": show(self.path),
            "msg": show(self.msg),
            "fixable": self.fixable,
            "remove": [show(lines[edit.index]) for edit in self.edits if edit.index is not None],
            "add": [show(edit.new) for edit in self.edits if edit.new is not None],
        }


def is_dynamic(major: int) -> bool:
    """Whether the kernel gives this major number of character devices to whoever comes first."""
    return 234 <= major <= 254 or 384 <= major <= 511


def check(host: HostView, guests: t.Sequence[GuestView]) -> list[Finding]:
    """Everything that is wrong, the host's own first, then container by container."""
    findings = _host(host)
    for guest in guests:
        findings += check_guest(host, guest)
    return findings + _shared(host, guests)


def check_guest(host: HostView, guest: GuestView) -> list[Finding]:
    """What is wrong with one container."""
    return list(_Guest(host, guest).findings())


def mended(host: HostView, guest: GuestView) -> tuple[str, list[Finding]]:
    """The text of the configuration with every mendable finding mended, and those findings."""
    done: list[Finding] = []
    text = "".join(line + "\n" for line in guest.conf.lines)
    for _round in range(_ROUNDS):
        fixable = [finding for finding in check_guest(host, guest) if finding.fixable]
        if not fixable:
            break
        done += [finding for finding in fixable if (finding.code, finding.path) not in {(f.code, f.path) for f in done}]
        text = edited(guest.conf, [edit for finding in fixable for edit in finding.edits])
        conf = parse_conf(text)
        guest = dataclasses.replace(guest, conf=conf, handed=handed(conf))
    return text, done


# -- the host ------------------------------------------------------------------------------------------------------


def _make(path: str) -> str:
    """The command that makes a missing node of the driver's."""
    name = path[len("/dev/nvidia") :]
    if name.isdigit() or name == "ctl":
        return "nvidia-modprobe -c %s" % (name if name.isdigit() else "0")
    if name.startswith("-uvm"):
        return "nvidia-modprobe -u -c 0"
    return "nvidia-modprobe -c 0"


def _host(host: HostView) -> list[Finding]:
    out = []
    for path, device in host.devices.items():
        wanted = host.wanted_majors(path)
        if device.kind == "file" and path.startswith("/dev/nvidia"):
            msg = "%s on the host is a plain file: something wrote to it while there was no node. Run `rm %s; %s`."
            out.append(Finding("plain_file", ERROR, None, msg % (path, path, _make(path)), path))
        elif device.kind == "c" and wanted and device.major not in wanted:
            msg = "%s on the host has major number %d, the driver has %s: it is of an earlier boot. Run `rm %s; %s`."
            now = " or ".join(str(major) for major in sorted(wanted))
            out.append(Finding("stale_node", ERROR, None, msg % (path, device.major, now, path, _make(path)), path))
    return out


def _shared(host: HostView, guests: t.Sequence[GuestView]) -> list[Finding]:
    names = {guest.vmid: "%d (%s)" % (guest.vmid, guest.name) for guest in guests}
    running = {guest.vmid for guest in guests if guest.running}
    out = []
    for gpu, vmids in shared_gpus({guest.vmid: guest.handed.gpus for guest in guests}).items():
        path = "/dev/nvidia%d" % gpu
        live = [vmid for vmid in vmids if vmid in running]
        which = "" if len(live) == len(vmids) else ", of which %s run" % (", ".join(map(str, live)) or "none")
        msg = (
            "%s is given to containers %s%s. Each sees the memory that all use, and only its own processes. If that is "
            "not meant, remove the line from all but one."
        ) % (path, ", ".join(names[vmid] for vmid in vmids), which)
        out += [Finding("shared_gpu", WARNING, vmid, msg, path) for vmid in vmids]
    return out


# -- one container -------------------------------------------------------------------------------------------------


class _Guest:
    def __init__(self, host: HostView, guest: GuestView) -> None:
        self.host = host
        self.guest = guest
        self.given = guest.handed
        #: As they will be once those of cgroup version 1 are written anew, which is a finding of its own.
        self.renewed = dataclasses.replace(
            self.given, rules=tuple(dataclasses.replace(rule, current=True) for rule in self.given.rules)
        )
        self.label = "container %d (%s)" % (guest.vmid, guest.name)

    def findings(self) -> t.Iterator[Finding]:
        for index, line in self.given.broken:
            yield self._make("bad_line", WARNING, "%s: `%s` means nothing to LXC." % (self._line(index), line))
        yield from self._old_rules()
        for device in self.given.devices:
            yield from self._device(device)
        yield from self._targets()
        yield from self._rules()
        if not self.given.hook:
            yield from self._control()
        yield from self._libraries()

    def _make(self, code: str, severity: str, msg: str, path: str = "", edits: t.Iterable[Edit] = ()) -> Finding:
        return Finding(code, severity, self.guest.vmid, "%s: %s" % (self.label, msg), path, tuple(edits))

    def _line(self, index: int) -> str:
        return "line %d" % (index + 1)

    # -- lines ---------------------------------------------------------------------------------------------------------

    def _old_rules(self) -> t.Iterator[Finding]:
        """Rules of cgroup version 1, which nothing reads any more."""
        lines = {rule.line for rule in self.given.rules if rule.current}
        for rule in self.given.rules:
            if rule.current:
                continue
            new = rule.line.replace("lxc.cgroup.", "lxc.cgroup2.", 1)
            msg = "%s: `%s` is of cgroup version 1 and does nothing here. " % (self._line(rule.index), rule.line)
            msg += "Remove it." if new in lines else "Write `%s`." % new
            edit = Edit(rule.index, None if new in lines else new)
            # Harmless where the other rules do without it.
            lacks = any(not self.given.allowed(d.kind, d.major, d.minor) for _path, d in self._mounted())
            yield self._make("cgroup1_rule", ERROR if lacks else WARNING, msg, edits=[edit])

    def _targets(self) -> t.Iterator[Finding]:
        seen: dict[str, Passed] = {}
        for device in self.given.devices:
            other = seen.setdefault(device.target, device)
            if other is not device:
                msg = "%s and %s both lead to %s in the container; only one is there. Remove one." % (
                    self._line(other.index),
                    self._line(device.index),
                    device.target,
                )
                same = other.source == device.source and other.kind == device.kind
                edits = [Edit(device.index, None)] if same else []
                yield self._make("duplicate_target", WARNING, msg, device.target, edits)

    # -- one device ----------------------------------------------------------------------------------------------------

    def _device(self, device: Passed) -> t.Iterator[Finding]:
        if device.absolute:
            # Only the target's own slash; the source may be the same text.
            head, target, tail = device.line.rpartition(" " + device.target)
            new = head + " " + device.target.lstrip("/") + tail if target else None
            yield self._make(
                "absolute_target",
                ERROR,
                "%s: LXC ignores a target with a leading slash. Write %s."
                % (self._line(device.index), device.target[1:]),
                device.source,
                [Edit(device.index, new)] if new else [],
            )
        found = self.host.devices.get(device.source)
        if found is None:
            yield self._missing(device)
            return
        if device.kind == "dev" and not found.is_node:
            msg = "the host's %s is no device node, so the container does not start." % device.source
            yield self._make("not_a_device", ERROR, msg, device.source)
            return
        if found.is_node:
            yield from self._permission(device, found)
            yield from self._inside(device, found)

    def _missing(self, device: Passed) -> Finding:
        path = device.source
        there = sorted(name for name in self.host.devices if name.startswith("/dev/nvidia"))
        effect = "it starts without it" if device.optional else "it does not start"
        if not device.nvidia:
            mend = "Load its driver on the host, or remove %s." % self._line(device.index)
        elif device.gpu is not None and there:
            mend = "The host has %s: remove %s, or find out why the GPU is gone (dmesg)." % (
                ", ".join(there),
                self._line(device.index),
            )
        else:
            mend = "Load the driver on the host (`%s`), before the container starts." % _make(path)
        msg = "the host has no %s, %s. %s" % (path, effect, mend)
        severity = ERROR if device.nvidia or not device.optional else WARNING
        return self._make("missing_node", severity, msg, path)

    def _permission(self, device: Passed, found: Device) -> t.Iterator[Finding]:
        """A node that is the host's own shows root of an unprivileged container what the host shows to others."""
        mapped = any(line.key == "lxc.idmap" for line in self.guest.conf.raw)
        if device.kind == "mount" and self.guest.conf.unprivileged and not mapped and found.mode & 0o006 != 0o006:
            msg = (
                "the host's %s has mode %04o, which keeps an unprivileged container out. Write `devN: %s` instead of "
                "%s, or give it mode 0666 on the host."
            ) % (device.source, found.mode, device.source, self._line(device.index))
            yield self._make("no_permission", ERROR, msg, device.source)

    def _inside(self, device: Passed, found: Device) -> t.Iterator[Finding]:
        """What the container has now, where it runs: of the start, or of something that wrote to the path."""
        if self.guest.inside is None or device.absolute:
            return
        has = self.guest.inside.devices.get(device.target)
        if has is None:
            msg = "it runs without %s, which its configuration names. It has it after `pct reboot %d`."
            yield self._make("restart_needed", WARNING, msg % (device.target, self.guest.vmid), device.source)
        elif has.kind == "file":
            msg = (
                "%s in the container is a plain file, made while the host had no node. Run `pct exec %d -- rm %s` and "
                "`pct reboot %d`."
            ) % (device.target, self.guest.vmid, device.target, self.guest.vmid)
            yield self._make("plain_file", ERROR, msg, device.source)
        elif has.is_node and (has.kind, has.major, has.minor) != (found.kind, found.major, found.minor):
            msg = "%s in the container is %s, on the host %s: the driver was loaded anew since. Run `pct reboot %d`."
            yield self._make(
                "restart_needed",
                ERROR,
                msg % (device.target, has.numbers, found.numbers, self.guest.vmid),
                device.source,
            )

    # -- device rules --------------------------------------------------------------------------------------------------

    def _mounted(self) -> list[tuple[str, Device]]:
        """Nodes that need a rule: mounted ones, also those in a mounted folder. C(devN:) brings its own."""
        out = []
        for device in self.given.devices:
            if device.kind != "mount":
                continue
            for path, found in self.host.devices.items():
                if found.is_node and (path == device.source or path.startswith(device.source + "/")):
                    # A node of an earlier boot is the host's to mend; the rule is for what will stand there then.
                    wanted = self.host.wanted_majors(path)
                    if wanted and found.major not in wanted:
                        found = dataclasses.replace(found, major=min(wanted))
                    out.append((path, found))
        return out

    def _rules(self) -> t.Iterator[Finding]:
        mounted = self._mounted()
        lacking: dict[tuple[str, int], list[str]] = {}
        for path, found in mounted:
            if not self.renewed.allowed(found.kind, found.major, found.minor):
                lacking.setdefault((found.kind, found.major), []).append(path)
        useless = self._useless([found for _path, found in mounted])
        for (kind, major), paths in lacking.items():
            names = " and ".join(paths)
            new = "%s: %s %d:* rwm" % (_ALLOW, kind, major)
            rule = next((rule for rule in useless if self._may_replace(rule, paths)), None)
            if rule is None:
                msg = "no rule lets it use %s (%s %d). Add `%s`; or hand it over by a devN: line, which needs none."
                yield self._make("not_allowed", ERROR, msg % (names, kind, major, new), paths[0], [Edit(None, new)])
                continue
            useless.remove(rule)
            owner = " and ".join(self.host.names_of(rule.major or 0)) or "nobody's"
            msg = (
                "%s allows major number %d, which is %s now; %s has %d since the last boot. Write `%s`; a devN: line "
                "would follow such moves by itself."
            ) % (self._line(rule.index), rule.major or 0, owner, names, major, new)
            yield self._make("major_moved", ERROR, msg, paths[0], [Edit(rule.index, new)])
        for rule in useless:
            if self.host.has_driver and not self.host.names_of(rule.major or 0):
                msg = "%s allows major number %d, which no driver has now, and whatever gets it next."
                yield self._make("unused_rule", WARNING, msg % (self._line(rule.index), rule.major or 0))

    def _useless(self, mounted: t.Sequence[Device]) -> list[Rule]:
        """Rules for one dynamic major number that nothing of the container's has, those of nobody first."""
        used = {found.major for found in mounted}
        out = [
            rule
            for rule in self.renewed.rules
            if rule.allow
            and rule.kind == "c"
            and rule.major is not None
            and is_dynamic(rule.major)
            and rule.major not in used
            and not any(name.startswith("nvidia") for name in self.host.names_of(rule.major))
        ]
        return sorted(out, key=lambda rule: bool(self.host.names_of(rule.major or 0)))

    def _may_replace(self, rule: Rule, paths: t.Sequence[str]) -> bool:
        """Whether the rule may have been for these nodes at an earlier boot. One for another driver's number may be
        meant so, unless what is missing is one of the numbers that move."""
        if not any(path.startswith("/dev/nvidia") for path in paths):
            return False
        return not self.host.names_of(rule.major or 0) or any(
            path.startswith(("/dev/nvidia-uvm", "/dev/nvidia-caps")) for path in paths
        )

    # -- the whole -----------------------------------------------------------------------------------------------------

    def _control(self) -> t.Iterator[Finding]:
        gpus = [device for device in self.given.devices if device.gpu is not None]
        if not gpus:
            return
        sources = {device.source for device in self.given.devices}
        taken = [int(key[3:]) for key in self.guest.conf.keys if key.startswith("dev") and key[3:].isdigit()]
        for path in _CONTROL:
            if path in sources:
                continue
            pattern = gpus[0]
            if pattern.kind == "dev":
                number = max(taken, default=-1) + 1
                taken.append(number)
                options = "".join(",%s=%s" % item for item in pattern.options.items())
                new = "dev%d: %s%s" % (number, path, options)
            else:
                new = "lxc.mount.entry: %s %s none bind,optional,create=file" % (path, path[1:])
            msg = "it has a GPU and no %s, without which nothing can use it. Add `%s`." % (path, new)
            there = path in self.host.devices
            if not there:
                msg += " The host has no such node yet: `%s`." % _make(path)
            # A devN: of a node that is not there would keep the container from starting.
            edits = [Edit(None, new)] if there or pattern.kind == "mount" else []
            yield self._make("missing_control_node", ERROR, msg, path, edits)

    def _libraries(self) -> t.Iterator[Finding]:
        inside, version = self.guest.inside, self.host.version
        if inside is None or not self.given.gpus or not version:
            return
        found = [inside.linked] if inside.linked else list(inside.libraries)
        if not inside.has_library:
            msg = "it has no libnvidia-ml or libcuda in the usual places. Install the driver's libraries, version %s."
            yield self._make("no_library", WARNING, msg % version)
        elif found and version not in found:
            msg = (
                "its NVIDIA libraries are %s, the host's kernel module is %s: NVML and CUDA refuse to work. Install %s "
                "in the container, without the kernel module."
            ) % (" and ".join(found), version, version)
            yield self._make("library_mismatch", ERROR, msg)
