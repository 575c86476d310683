# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Bringing a fleet up and down: its network, its hypervisors' LXC configuration, their cgroup."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from . import trees
from .fleet import Guest, Hypervisor, guest_conf, load_fleet, save_fleet
from .place import INSIDE, LabError, Place, run

GATEWAY = "10.99.0.1/16"
BRIDGE = "lab0"


def up(place: Place, fleet: list[Hypervisor], seconds: float = 180) -> None:
    """Start a fleet and wait until every guest that starts has started; whatever was up before goes first."""
    down(place)
    trees.bake(place)
    make_key(place)
    gpus = trees.openable_devices(max(host.gpus for host in fleet))
    controls = trees.control_devices() if gpus else []
    majors = sorted({major for major, _ in gpus + controls})
    save_fleet(fleet, place.fleet_file)
    write_known_hosts(place, fleet)
    write_ssh(place)
    make_network(place)
    for host in fleet:
        write_hypervisor(place, host, gpus, controls, majors)
    start(place, fleet)
    wait_ready(place, fleet, seconds)


def start(place: Place, hosts: list[Hypervisor]) -> None:
    """Start hypervisors, all in one entry into the lab's namespaces, a few at a time."""
    words = "xargs -P 4 -I{} lxc-start -P /mnt -n {} -o /mnt/{}/lxc.log -l ERROR"
    names = "\n".join(host.name for host in hosts)
    done = place.run_inside(["sh", "-c", f'printf "%s\\n" "$1" | {words}', "lab", names], check=False)
    if done.returncode != 0:
        logs = [(place.folder / host.name / "lxc.log") for host in hosts]
        said = "".join(log.read_text(encoding="utf-8", errors="replace") for log in logs if log.exists())
        raise LabError(f"a hypervisor did not start:\n{done.stdout}{said}")


def down(place: Place) -> None:
    """End the lab: processes by its cgroup, then the network, then the files but the trees; whatever state it is in."""
    kill_cgroup(place)
    if place.has_network():
        kill_in_network(place)
        run(["ip", "netns", "del", place.netns])
    for path in place.folder.glob("px*"):
        trees.remove_tree(path)
    if (place.folder / "pve").exists():
        trees.remove_tree(place.folder / "pve")
    place.fleet_file.unlink(missing_ok=True)
    place.known_hosts.unlink(missing_ok=True)
    sockets = Path(place.control_path_dir).expanduser()  # the masters that listened there are dead
    if sockets.exists():
        shutil.rmtree(sockets)


# --- cgroup ---------------------------------------------------------------------------------------------------------


def cgroup2() -> Path | None:
    """Where this machine has the cgroup2 tree: the whole of /sys/fs/cgroup, or beside version 1 in …/unified."""
    for folder in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
        if os.path.exists(f"{folder}/cgroup.procs"):
            return Path(folder)
    return None


def kill_cgroup(place: Place, seconds: float = 20) -> None:
    """Kill all that runs in the lab (the kernel does it in one step) and remove its cgroups."""
    root = cgroup2()
    top = root / place.name if root else None
    if top is None or not top.is_dir():
        return
    (top / "cgroup.kill").write_text("1", encoding="ascii")
    poll(lambda: "populated 0" in (top / "cgroup.events").read_text(encoding="ascii"), seconds, "processes to end")
    for folder, _, _ in os.walk(top, topdown=False):
        os.rmdir(folder)


def kill_in_network(place: Place) -> None:
    """Kill what is in the lab's network but not in its cgroup: masters of multiplexed ssh, runs of `lab run`."""
    network = os.stat(f"/run/netns/{place.netns}")
    spared = set(ancestry())
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with contextlib.suppress(ProcessLookupError, PermissionError, FileNotFoundError):
            handle = os.pidfd_open(pid)
            try:
                found = os.stat(f"/proc/{pid}/ns/net")
                if pid not in spared and (found.st_dev, found.st_ino) == (network.st_dev, network.st_ino):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)


def ancestry() -> Iterator[int]:
    """This process and those above it: `lab down` may run inside `lab run`."""
    pid = os.getpid()
    while pid > 0:
        yield pid
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
        pid = int(status.split("PPid:")[1].split()[0])


def kill_hypervisor(place: Place, host: Hypervisor) -> None:
    place.run_inside(["lxc-stop", "-P", INSIDE, "-n", host.name, "-k"])


# --- network and keys -----------------------------------------------------------------------------------------------


def make_network(place: Place) -> None:
    inside = ["ip", "-n", place.netns]
    run(["ip", "netns", "add", place.netns])
    run([*inside, "link", "set", "lo", "up"])
    run([*inside, "link", "add", BRIDGE, "type", "bridge"])
    run([*inside, "addr", "add", GATEWAY, "dev", BRIDGE])
    run([*inside, "link", "set", BRIDGE, "up"])


def make_key(place: Place) -> None:
    if not place.key.exists():
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "cleanslate-lab", "-f", str(place.key)])


def write_known_hosts(place: Place, fleet: list[Hypervisor]) -> None:
    key = trees.host_key(place)
    place.known_hosts.write_text("".join(f"{host.address} {key}\n" for host in fleet), encoding="ascii")


def write_ssh(place: Place) -> None:
    """An ssh that starts in the lab's network: the inventory names it, so that Ansible itself need not run there."""
    lines = ["#!/bin/sh", f'exec nsenter --net=/run/netns/{place.netns} -- ssh "$@"']
    place.ssh_wrapper.write_text("\n".join(lines) + "\n", encoding="ascii")
    place.ssh_wrapper.chmod(0o755)


# --- one hypervisor -------------------------------------------------------------------------------------------------


def write_hypervisor(
    place: Place, host: Hypervisor, gpus: list[tuple[int, int]], controls: list[tuple[int, int]], majors: list[int]
) -> None:
    """Its LXC configuration, what its own boot reads (/etc/lab), its guests' configurations in the cluster folder."""
    folder = place.folder / host.name
    delta = folder / "delta"
    for path in (folder / "vz", delta / "etc/lab", delta / "etc/pve", delta / "root/.ssh"):
        path.mkdir(parents=True)
    (delta / "root").chmod(0o700)
    (delta / "root/.ssh").chmod(0o700)
    shutil.copyfile(f"{place.key}.pub", delta / "root/.ssh/authorized_keys")
    nodes = [(f"nvidia{n}", *gpus[n]) for n in range(host.gpus)]
    if host.gpus:
        nodes += [(name, *numbers) for name, numbers in zip(("nvidiactl", "nvidia-uvm"), controls, strict=True)]
    write(delta / "etc/hostname", f"{host.name}\n")
    write(delta / "etc/lab/host.conf", f"ADDRESS={host.address}\nMAC={host.mac}\n")
    write(delta / "etc/lab/devices", "".join(f"{name} {major} {minor}\n" for name, major, minor in nodes))
    write(delta / "etc/lab/guests", "".join(guest_line(guest) for guest in host.guests))
    trees.link(delta / "etc/pve/lxc", f"nodes/{host.name}/lxc")
    trees.link(delta / "etc/pve/local", f"nodes/{host.name}")
    confs = place.folder / "pve" / host.name / "lxc"
    confs.mkdir(parents=True)
    for guest in host.guests:
        write(confs / f"{guest.vmid}.conf", guest_conf(guest, host, majors))
    write(folder / "config", lxc_config(place, host))


def guest_line(guest: Guest) -> str:
    return f"{guest.vmid} {guest.base} {'shifted' if guest.unprivileged else 'plain'}\n"


def write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def lxc_config(place: Place, host: Hypervisor) -> str:
    """LXC configuration of a hypervisor: a container that may hold containers."""
    folder = f"{INSIDE}/{host.name}"
    settings = {
        "uts.name": host.name,
        "rootfs.path": f"overlay:{INSIDE}/rootfs:{folder}/delta",
        "arch": "amd64",
        "signal.halt": "SIGRTMIN+3",
        "net.0.type": "veth",
        "net.0.link": BRIDGE,
        "net.0.name": "eth0",
        "net.0.veth.pair": host.name,
        "net.0.hwaddr": host.mac,
        "net.0.flags": "up",
        "tty.max": "0",
        "pty.max": "1024",
        "mount.auto": "proc:rw sys:rw cgroup:rw:force",
        "cgroup.relative": "0",
        "cgroup.dir.container": f"{place.name}/{host.name}",
        "cgroup.dir.container.inner": "ns",
        "cgroup.dir.monitor": f"{place.name}/monitor-{host.name}",
        "cgroup2.devices.allow": "a",
        "apparmor.profile": "unconfined",
    }
    mounts = [
        # Guests with their own user namespace may mount proc and sys only where an unhidden one is visible.
        "proc dev/.lxc/proc proc create=dir,optional",
        "sys dev/.lxc/sys sysfs create=dir,optional",
        f"{folder}/vz var/lib/vz none bind,create=dir",  # guests' overlays cannot lie on the hypervisor's own overlay
        f"{INSIDE}/pve etc/pve/nodes none bind,create=dir",  # Proxmox shows every node's guests on every node
        f"{INSIDE}/rootfs srv/base none bind,ro,create=dir",
    ]
    for tree, where in (("rootfs-sglang", "srv/base-sglang"), ("sglang", "srv/sglang")):
        if (place.folder / tree).is_dir():
            mounts.append(f"{INSIDE}/{tree} {where} none bind,ro,create=dir")
    lines = [f"lxc.{key} = {value}" for key, value in settings.items()]
    return "\n".join(lines + [f"lxc.mount.entry = {entry} 0 0" for entry in mounts]) + "\n"


# --- waiting --------------------------------------------------------------------------------------------------------


def poll(condition: Callable[[], bool], seconds: float, what: str, interval: float = 0.05) -> None:
    """Wait for a condition; a LabError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise LabError(f"waited {seconds:.0f} s for {what}")
        time.sleep(interval)


def init_pids(place: Place, hosts: list[Hypervisor]) -> dict[str, int]:
    """The process 1 of each hypervisor that runs, by name, as the machine numbers it."""
    script = 'for name do echo "$name $(lxc-info -P /mnt -n "$name" -p -H 2>/dev/null)"; done'
    if not place.has_network():
        return {}
    out = place.run_inside(["sh", "-c", script, "lab", *(host.name for host in hosts)], check=False).stdout
    rows = (line.split() for line in out.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}


def wait_ready(place: Place, hosts: list[Hypervisor], seconds: float) -> None:
    """Wait until the hypervisors have started all the guests that start, and those say that they are up."""
    pids: dict[str, int] = {}
    deadline = time.monotonic() + seconds
    for host in hosts:

        def ready(host: Hypervisor = host) -> bool:
            if host.name not in pids:
                pids.update(init_pids(place, hosts))
            return host.name in pids and arrived(f"/proc/{pids[host.name]}/root/run")

        try:
            poll(ready, max(0.0, deadline - time.monotonic()), f"{host.name} and its guests")
        except LabError as error:
            raise LabError(f"{error}\n{journal(place, host)}") from None


def arrived(run_folder: str) -> bool:
    """Whether a hypervisor's guests are up, by the file that its boot leaves; a LabError when that failed."""
    if os.path.exists(f"{run_folder}/lab-guests-failed"):
        raise LabError("a guest did not start")
    return os.path.exists(f"{run_folder}/lab-guests-ready")


def journal(place: Place, host: Hypervisor) -> str:
    argv = ["lxc-attach", "-P", INSIDE, "-n", host.name, "--", "journalctl", "-b", "-n", "40", "--no-pager"]
    return place.run_inside(argv, check=False).stdout


def the_fleet(place: Place) -> list[Hypervisor]:
    """The fleet that is up, or a LabError."""
    fleet = load_fleet(place.fleet_file)
    if not fleet or not place.has_network():
        raise LabError("no lab is up here (lab up H G GPUS)")
    return fleet


def ssh(place: Place, host: Hypervisor, words: list[str], **options) -> subprocess.CompletedProcess[str]:
    """Run a shell line on a hypervisor, from inside the lab's network; raises nothing."""
    argv = ["ip", "netns", "exec", place.netns, *place.ssh(host.address), "--", *words]
    return subprocess.run(argv, text=True, check=False, **options)
