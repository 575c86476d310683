# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What can be broken in a running lab, and mended again. Targets are `px1` or `px1/ct101` (`ct101` alone will do)."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from . import machine
from .fleet import Guest
from .place import LabError, Place, run

# Runs in the guest. Each path gets an overlay whose upper layer is a full tmpfs: what was there stays readable, and
# there is no room for more.
FILL = """
set -e
full=/run/lab-full
mkdir -p $full
mount -t tmpfs -o size=256k,mode=0700 lab-full $full
for path do
  name=$(echo "$path" | tr / _)
  mkdir -p "$full/$name/upper" "$full/$name/work"
  chmod --reference="$path" "$full/$name/upper"
  chown --reference="$path" "$full/$name/upper"
  mount -t overlay lab-full -o "lowerdir=$path,upperdir=$full/$name/upper,workdir=$full/$name/work" "$path"
done
cat /dev/zero > $full/filler 2>/dev/null || true
"""
EMPTY = """
for path in $(awk '$1 == "lab-full" && $3 == "overlay" {print $2}' /proc/mounts); do umount -l "$path"; done
umount -l /run/lab-full
"""
FULL_PATHS = ("/tmp", "/var/lib", "/root")


class Target:
    """The hypervisor and, when one is named, the guest."""

    def __init__(self, place: Place, text: str) -> None:
        self.place = place
        first, _, second = text.partition("/")
        for host in machine.the_fleet(place):
            if host.name == first and not second:
                self.host, self._guest = host, None
                return
            for guest in host.guests:
                if guest.name == (second or first) and (not second or host.name == first):
                    self.host, self._guest = host, guest
                    return
        raise LabError(f"no {text} in this lab")

    @property
    def guest(self) -> Guest:
        if self._guest is None:
            raise LabError(f"this needs a guest, {self.host.name} is a hypervisor")
        return self._guest

    @property
    def is_guest(self) -> bool:
        return self._guest is not None

    def on_hypervisor(self, line: str) -> str:
        """Run a shell line as root on the hypervisor, without its network."""
        argv = ["lxc-attach", "-P", "/mnt", "-n", self.host.name, "--clear-env", "--", "bash", "-c", line]
        return self.place.run_inside(argv).stdout

    def in_guest(self, script: str, *words: str) -> str:
        return self.on_hypervisor(f"pct exec {self.guest.vmid} -- {shlex.join(['sh', '-c', script, 'lab', *words])}")


def network(state: str) -> Callable[[Target], None]:
    def change(target: Target) -> None:
        if target.is_guest:
            target.on_hypervisor(f"ip link set veth{target.guest.vmid}i0 {state}")
        else:
            run(["ip", "-n", target.place.netns, "link", "set", target.host.name, state])

    return change


def pct(verb: str) -> Callable[[Target], None]:
    def change(target: Target) -> None:
        target.on_hypervisor(f"pct {verb} {target.guest.vmid}")
        if verb in ("start", "reboot"):
            pid = f"$(lxc-info -n {target.guest.vmid} -p -H)"
            target.on_hypervisor(f"timeout 60 sh -c 'until [ -e /proc/{pid}/root/run/lab-ready ]; do sleep 0.1; done'")

    return change


def disk_full(target: Target) -> None:
    target.in_guest(FILL, *FULL_PATHS)


def disk_heal(target: Target) -> None:
    target.in_guest(EMPTY)


def hypervisor_down(target: Target) -> None:
    machine.kill_hypervisor(target.place, target.host)


def hypervisor_up(target: Target) -> None:
    machine.start(target.place, [target.host])
    machine.wait_ready(target.place, [target.host], 120)


def migrate(target: Target) -> None:
    """Move a guest to the next hypervisor, as far as pct can tell: its configuration lies with another node."""
    fleet = machine.the_fleet(target.place)
    others = [host for host in fleet if host.number != target.host.number]
    if not others:
        raise LabError("there is no other hypervisor to migrate to")
    vmid = target.guest.vmid
    target.on_hypervisor(f"pct stop {vmid} --skiplock || true")
    target.on_hypervisor(f"mv /etc/pve/nodes/{target.host.name}/lxc/{vmid}.conf /etc/pve/nodes/{others[0].name}/lxc/")


def migrate_back(target: Target) -> None:
    vmid = target.guest.vmid
    target.on_hypervisor(f"mv /etc/pve/nodes/*/lxc/{vmid}.conf /etc/pve/nodes/{target.host.name}/lxc/")
    target.on_hypervisor(f"pct start {vmid}")


KINDS: dict[str, tuple[Callable[[Target], None], str]] = {
    "network-cut": (network("down"), "take a hypervisor's, or a guest's, network link down"),
    "network-heal": (network("up"), "and up again"),
    "guest-reboot": (pct("reboot"), "pct reboot, and wait until the guest is up"),
    "guest-stop": (pct("stop"), "pct stop"),
    "guest-start": (pct("start"), "pct start, and wait until the guest is up"),
    "disk-full": (disk_full, f"no room left in the guest under {', '.join(FULL_PATHS)}"),
    "disk-heal": (disk_heal, "room again"),
    "hypervisor-down": (hypervisor_down, "power off, as if the plug was pulled: its guests die with it"),
    "hypervisor-up": (hypervisor_up, "power on, and wait until its guests are up"),
    "migrate": (migrate, "stop a guest and move its configuration to another node"),
    "migrate-back": (migrate_back, "and back, started"),
}


def break_(place: Place, kind: str, text: str) -> None:
    try:
        change, _ = KINDS[kind]
    except KeyError:
        raise LabError(f"no such fault: {kind} (one of {', '.join(KINDS)})") from None
    change(Target(place, text))
