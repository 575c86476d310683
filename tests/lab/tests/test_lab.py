# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The faults that a lab can make, and their mending; and that a lab leaves nothing behind, however it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from labkit.client import Lab
from labkit.machine import cgroup2, poll
from labkit.place import CHECKOUT, HERE, Place

PROGRAM = str(HERE / "lab")


@pytest.fixture
def guest(lab: Lab) -> str:
    return next(guest.name for guest in lab.host.guests if guest.kind == "privileged")


def ok(lab: Lab, *words: str) -> None:
    done = lab.command(*words)
    assert done.returncode == 0, done


def reachable(lab: Lab) -> bool:
    """By a connection of its own: a multiplexed one lives through a cut."""
    argv = [str(lab.place.ssh_wrapper), *lab.place.ssh(lab.host.address, ("ConnectTimeout=1",))[1:], "--", "true"]
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


def test_network_cut(lab: Lab) -> None:
    assert reachable(lab)
    try:
        ok(lab, "break", "network-cut", lab.host.name)
        assert not reachable(lab)
    finally:
        ok(lab, "break", "network-heal", lab.host.name)
    poll(lambda: reachable(lab), 10, "the network")


def test_guest_reboot(lab: Lab, guest: str) -> None:
    show = "pct exec {privileged} -- stat -c %Z /proc/1"
    before = lab.on_host(show).stdout
    time.sleep(1)  # the clock of the comparison ticks in seconds
    ok(lab, "break", "guest-reboot", guest)
    assert lab.on_host(show).stdout != before
    assert lab.on_host("pct exec {privileged} -- systemctl is-active basic.target").stdout == "active\n"


@pytest.mark.parametrize("kind", ["privileged", "unprivileged"])
def test_disk_full(lab: Lab, kind: str) -> None:
    name = next(guest.name for guest in lab.host.guests if guest.kind == kind)
    inside = f"pct exec {{{kind}}} -- sh -c "
    lab.on_host(f"{inside} 'echo kept > /root/kept'")
    try:
        ok(lab, "break", "disk-full", name)
        for folder in ("/root", "/tmp", "/var/lib"):
            done = lab.on_host(f"{inside} 'head -c 8192 /dev/zero > {folder}/new'")
            assert "No space left on device" in done.stderr, folder
        assert lab.on_host(f"{inside} 'cat /root/kept'").stdout == "kept\n"
    finally:
        ok(lab, "break", "disk-heal", name)
    done = lab.on_host(f"{inside} 'head -c 8192 /dev/zero > /root/new; stat -c %s /root/new; rm /root/new /root/kept'")
    assert done.stdout == "8192\n"


def test_hypervisor_down_and_up(lab: Lab) -> None:
    running = [str(guest.vmid) for guest in lab.host.guests if guest.starts]
    try:
        ok(lab, "break", "hypervisor-down", lab.host.name)
        assert not reachable(lab)
        row = lab.command("status").stdout.splitlines()[1].split()
        assert row[:4] == [lab.host.name, lab.host.address, "hypervisor", "down"]
    finally:
        ok(lab, "break", "hypervisor-up", lab.host.name)
    lines = lab.on_host("pct list").stdout.splitlines()[1:]
    assert [line.split()[0] for line in lines if line.split()[1] == "running"] == running


def test_a_fault_needs_a_target_that_is_there(lab: Lab) -> None:
    assert "no px9 in this lab" in lab.command("break", "network-cut", "px9").stderr
    assert "needs a guest" in lab.command("break", "guest-reboot", "px1").stderr


# --- nothing stays ----------------------------------------------------------------------------------------------------


class Second:
    """Another lab beside the first, in a folder with a space and a colon in its name."""

    def __init__(self) -> None:
        self.folder = CHECKOUT / "build" / f"lab two: {os.getpid()}"
        self.place = Place(self.folder)
        self.environment = {**os.environ, "CLEANSLATE_LAB_DIR": str(self.folder)}

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [PROGRAM, *words], env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, *words: str) -> tuple[int, str]:
        process = self.start(*words)
        output = process.communicate(timeout=120)[0]
        return process.returncode, output

    def leftovers(self) -> list[str]:
        """What a lab that is down must not have left: names of its network, cgroup, files; processes in its cgroup."""
        found = [name for name in os.listdir("/run/netns") if name == self.place.netns] if has_netns() else []
        found += [path.name for path in cgroup2().glob(self.place.name)]
        found += [path.name for path in self.folder.iterdir() if path.name.startswith(("px", "pve", "fleet"))]
        return found


def has_netns() -> bool:
    return os.path.isdir("/run/netns")


def machine_state() -> tuple[set[str], str]:
    """Mounts and network links of the machine itself."""
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    return {line.split()[4] for line in mounts if not line.split()[4].startswith("/run/netns")}, links


@pytest.fixture
def second(lab: Lab) -> Iterator[Second]:
    before = machine_state()
    made = Second()
    made.folder.mkdir(parents=True)
    # Hard links: the tree takes neither time nor room, and `up` replaces files rather than writing into them.
    shutil.copytree(lab.place.rootfs, made.folder / "rootfs", symlinks=True, copy_function=os.link)
    try:
        yield made
        assert made.run("clean")[0] == 0
        assert not made.folder.exists()
        assert machine_state() == before
    finally:
        made.run("clean")


def test_two_labs_side_by_side(lab: Lab, second: Second) -> None:
    assert second.run("up", "1", "1", "1")[0] == 0
    assert "ct101  privileged    running   0" in second.run("status")[1]
    assert second.run("ssh", "ct101", "cat", "/proc/sys/kernel/hostname") == (0, "ct101\n")
    assert lab.on_host("pct list | wc -l").stdout == "7\n"
    assert second.run("down") == (0, "")
    assert second.leftovers() == []
    assert second.run("down") == (0, "")
    assert lab.on_host("pct list | wc -l").stdout == "7\n"


def test_with(second: Second) -> None:
    code, output = second.run("with", "1", "0", "0", "--", "sh", "-c", "ip -o addr show lab0; exit 3")
    assert code == 3
    assert "10.99.0.1/16" in output
    assert second.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_lab_that_is_interrupted_while_it_starts(second: Second, number: signal.Signals) -> None:
    process = second.start("up", "2", "3", "2")
    poll(lambda: any(cgroup2().glob(f"{second.place.name}/monitor*")), 30, "the first hypervisor")
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert second.leftovers() == []


def test_a_lab_whose_program_was_killed(second: Second) -> None:
    process = second.start("up", "2", "3", "2")
    poll(lambda: any(cgroup2().glob(f"{second.place.name}/monitor*")), 30, "the first hypervisor")
    process.kill()
    process.wait()
    assert second.leftovers() != []
    assert second.run("down") == (0, "")
    assert second.leftovers() == []


def test_a_lab_that_cannot_start(second: Second) -> None:
    code, output = second.run("up", "1", "1", "99")
    assert code == 1
    assert "devices that can stand for GPUs, 99 are wanted" in output
    assert second.leftovers() == []
