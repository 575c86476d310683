# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a fleet consists of: hypervisors, guests, their kinds, addresses and GPUs. Nothing here touches the machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

# The kind of a guest follows from its position; from the seventh on the three running kinds go on in turn.
FIRST_KINDS = ("privileged", "unprivileged", "passthrough", "stopped", "locked", "noname")
RUNNING_KINDS = ("privileged", "unprivileged", "passthrough")
MOST_HYPERVISORS, MOST_GUESTS = 20, 99


@dataclasses.dataclass(frozen=True)
class Guest:
    """A guest: `passthrough` ones have devN: lines, all others have bind-mounted nodes."""

    vmid: int
    kind: str
    address: str
    gpus: tuple[int, ...]
    sglang: bool = False  # on Debian 12 (Python 3.11), with the real SGLang under /opt/sglang

    @property
    def name(self) -> str:
        """Its host name in inventories."""
        return f"ct{self.vmid}"

    @property
    def starts(self) -> bool:
        return self.kind != "stopped"

    @property
    def unprivileged(self) -> bool:
        # Passthrough goes with both; the first of a hypervisor is privileged.
        return self.kind == "unprivileged" or (self.kind == "passthrough" and self.vmid % 100 > len(FIRST_KINDS))

    @property
    def base(self) -> str:
        return "sglang" if self.sglang else "base"


@dataclasses.dataclass(frozen=True)
class Hypervisor:
    number: int
    gpus: int
    guests: tuple[Guest, ...]

    @property
    def name(self) -> str:
        return f"px{self.number}"

    @property
    def address(self) -> str:
        return f"10.99.{self.number}.1"

    @property
    def mac(self) -> str:
        # Fixed: a hypervisor that comes back with another address would be unreachable until ARP caches forget it.
        return f"02:16:3e:00:00:{self.number:02x}"


def make_fleet(hypervisors: int, guests: int, gpus: int, share: bool = False, sglang: bool = False) -> list[Hypervisor]:
    """A fleet. GPUs are dealt out evenly; with fewer GPUs than guests, or with `share`, guests share them."""
    if not (1 <= hypervisors <= MOST_HYPERVISORS and 0 <= guests <= MOST_GUESTS and gpus >= 0):
        raise ValueError(f"between 1 and {MOST_HYPERVISORS} hypervisors, 0 and {MOST_GUESTS} guests")
    return [
        Hypervisor(
            number,
            gpus,
            tuple(
                Guest(
                    vmid=100 * number + place,
                    kind=kind_at(place),
                    address=f"10.99.{number}.{100 + place}",
                    gpus=gpus_of(place - 1, guests, gpus, share),
                    sglang=sglang and place == 1,
                )
                for place in range(1, guests + 1)
            ),
        )
        for number in range(1, hypervisors + 1)
    ]


def kind_at(place: int) -> str:
    if place <= len(FIRST_KINDS):
        return FIRST_KINDS[place - 1]
    return RUNNING_KINDS[(place - 1) % len(RUNNING_KINDS)]


def gpus_of(index: int, guests: int, gpus: int, share: bool) -> tuple[int, ...]:
    if share or gpus == 0:
        return tuple(range(gpus))
    each = max(1, gpus // guests)
    return tuple(sorted({(index * each + n) % gpus for n in range(each)}))


def save_fleet(fleet: list[Hypervisor], path: Path) -> None:
    path.write_text(json.dumps([dataclasses.asdict(host) for host in fleet], indent=1) + "\n", encoding="utf-8")


def load_fleet(path: Path) -> list[Hypervisor]:
    """The fleet that is up; empty when there is none."""
    if not path.exists():
        return []
    hosts = json.loads(path.read_text(encoding="utf-8"))
    for host in hosts:
        host["guests"] = tuple(Guest(**{**guest, "gpus": tuple(guest["gpus"])}) for guest in host["guests"])
    return [Hypervisor(**host) for host in hosts]


def guest_conf(guest: Guest, host: Hypervisor, majors: list[int]) -> str:
    """The guest's /etc/pve/lxc/VMID.conf."""
    nodes = [f"/dev/nvidia{gpu}" for gpu in guest.gpus] + (["/dev/nvidiactl", "/dev/nvidia-uvm"] if host.gpus else [])
    mac = f"BC:24:11:00:{guest.vmid // 256:02X}:{guest.vmid % 256:02X}"
    keys = {
        "arch": "amd64",
        "cores": "2",
        "memory": "2048",
        "net0": f"name=eth0,bridge=vmbr0,hwaddr={mac},ip={guest.address}/16,type=veth",
        "onboot": "1" if guest.starts else "0",
        "ostype": "debian",
        "rootfs": f"local:{guest.vmid}/subvol-{guest.vmid}-disk-0.subvol,size=8G",
        "swap": "512",
    }
    if guest.kind != "noname":
        keys["hostname"] = guest.name
    if guest.unprivileged:
        keys["unprivileged"] = "1"
    if guest.kind == "locked":
        keys["lock"] = "backup"
    if nodes:
        keys["tags"] = "gpu"
    raw = []
    if guest.kind == "passthrough":
        keys.update((f"dev{number}", f"{node},gid=44") for number, node in enumerate(nodes))
    else:
        raw = [f"lxc.cgroup2.devices.allow: c {major}:* rwm" for major in majors]
        raw += [f"lxc.mount.entry: {node} {node[1:]} none bind,optional,create=file" for node in nodes]
    # For the stand-in NVML: a driver sees every process of the machine, whatever namespace asks.
    raw.append("lxc.mount.entry: /proc srv/hostproc none rbind,create=dir")
    if guest.sglang:
        raw.append("lxc.mount.entry: /srv/sglang opt/sglang none bind,ro,create=dir")
    return "".join(f"{key}: {keys[key]}\n" for key in sorted(keys)) + "".join(f"{line}\n" for line in raw)
