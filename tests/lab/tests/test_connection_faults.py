# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The pct connection when something between Ansible and the command breaks: what is said, and what is left."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from labkit import inventory
from labkit.client import Lab
from labkit.fleet import Guest
from labkit.machine import poll

ANSIBLE = Path(sys.executable).with_name("ansible")
UNREACHABLE = 4
PLAIN_SSH = "'-o ControlMaster=auto -o ControlPersist=60s'"  # the checkout's ansible.cfg sets ServerAliveInterval

# Stands for sudo with a rule for root without a password; the tree has none. It takes `-n COMMAND`.
SUDO = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(int count, char **words) {
    if (count < 3 || strcmp(words[1], "-n") || setgid(0) || setuid(0)) return 1;
    setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin", 1);
    execvp(words[2], words + 2);
    fprintf(stderr, "sudo: %s: command not found\n", words[2]);
    return 1;
}
"""


def guest_of(lab: Lab, kind: str) -> Guest:
    return next(guest for guest in lab.host.guests if guest.kind == kind)


def ansible(lab: Lab, guest: Guest, *words: str, **variables: object) -> subprocess.Popen[str]:
    extra = [word for name, value in variables.items() for word in ("-e", f"{name}={value}")]
    argv = [str(ANSIBLE), "-i", str(inventory.folder(lab.place)), guest.name, *words, *extra]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(lab.checkout / "ansible.cfg")}
    return subprocess.Popen(
        argv, cwd=lab.checkout, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def end(process: subprocess.Popen[str], seconds: float = 60) -> tuple[int, str]:
    """Its code, and what it said as one line."""
    said, _ = process.communicate(timeout=seconds)
    return process.returncode, " ".join(said.split())


@contextlib.contextmanager
def long_command(lab: Lab, guest: Guest, **variables: object) -> Iterator[subprocess.Popen[str]]:
    """A command that runs in the guest, and is running; it adds a line to /run/fault when it starts."""
    pct = f"pct exec {guest.vmid} --"
    lab.on_host(f"{pct} rm -f /run/fault")
    process = ansible(lab, guest, "-m", "raw", "-a", "echo run >> /run/fault; exec sleep 300", **variables)
    try:
        poll(lambda: lab.on_host(f"{pct} test -s /run/fault").returncode == 0, 30, "the command", 0.1)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def broke(lab: Lab, kind: str, target: str) -> None:
    done = lab.command("break", kind, target)
    assert done.returncode == 0, done.stderr


def settings(lab: Lab, text: str) -> None:
    lab.on_host(f"printf '%s\\n' {shlex.quote(text)} > /etc/pct-standin.conf")


def master_of(lab: Lab) -> tuple[Path, int]:
    """The socket and the pid of a connection to the hypervisor that Ansible holds."""
    folder = Path(lab.place.control_path_dir).expanduser()
    for path in folder.iterdir():
        if path.is_socket():
            argv = [str(lab.place.ssh_wrapper), "-S", str(path), "-O", "check", "x"]
            told = subprocess.run(argv, capture_output=True, text=True, check=False)
            if found := re.search(r"pid=(\d+)", told.stderr):
                return path, int(found[1])
    raise AssertionError(f"no connection in {folder}")


@pytest.fixture(autouse=True)
def _ready(lab: Lab) -> None:
    assert lab.command("inventory").returncode == 0


def test_a_guest_that_stops_in_the_middle(lab: Lab) -> None:
    guest = guest_of(lab, "noname")
    with long_command(lab, guest, ansible_ssh_retries=3) as process:
        broke(lab, "guest-stop", guest.name)
        code, said = end(process)
    broke(lab, "guest-start", guest.name)
    assert code == UNREACHABLE
    assert f"container {guest.vmid} stopped while the command ran (pct start {guest.vmid})" in said


def test_a_connection_that_is_killed(lab: Lab) -> None:
    """The command goes on, is not started a second time, and the next task names it."""
    guest = guest_of(lab, "privileged")
    with long_command(lab, guest, ansible_ssh_retries=3) as process:
        os.kill(master_of(lab)[1], signal.SIGKILL)
        code, said = end(process)
    assert code == UNREACHABLE
    found = re.search(rf"may still run in container {guest.vmid} as process (\d+)", said)
    assert found, said
    assert lab.on_host(f"pct exec {guest.vmid} -- cat /run/fault").stdout == "run\n"
    code, said = end(ansible(lab, guest, "-m", "ping"))
    assert code == 0
    warning = re.search(
        r"process (\d+) \(sleep, (\d+)\) still runs from a connection that was lost; (pct .* -- kill \d+)", said
    )
    assert warning, said
    assert warning[1] == found[1]
    assert lab.on_host(warning[3]).returncode == 0
    code, said = end(ansible(lab, guest, "-m", "ping"))
    assert (code, "still runs" in said) == (0, False)


def test_a_hypervisor_that_falls_silent(lab: Lab) -> None:
    """Within the time that is set, during a command; and for those that come after it."""
    guest = guest_of(lab, "privileged")
    own = {"ansible_control_path_dir": f"{lab.place.control_path_dir}/silent", "ansible_ssh_args": PLAIN_SSH}
    with long_command(lab, guest, ansible_pct_alive_timeout=4, **own) as process:
        broke(lab, "network-cut", lab.host.name)
        try:
            code, said = end(process, 40)
            assert code == UNREACHABLE
            assert "the connection was lost while the command ran" in said
            begun = time.monotonic()
            code, said = end(ansible(lab, guest, "-m", "ping", ansible_ssh_timeout=1, **own), 40)
            assert (code, lab.host.address in said, "container" in said) == (UNREACHABLE, True, False)
            assert time.monotonic() - begun < 20
        finally:
            broke(lab, "network-heal", lab.host.name)
    lab.on_host(f"pct exec {guest.vmid} -- pkill -x sleep")
    assert end(ansible(lab, guest, "-m", "ping"))[0] == 0


def test_a_guest_without_room(lab: Lab, tmp_path: Path) -> None:
    guest = guest_of(lab, "unprivileged")
    (tmp_path / "large").write_bytes(b"x" * (2 << 20))
    broke(lab, "disk-full", guest.name)
    try:
        words = ("-m", "copy", "-a", f"src={tmp_path}/large dest=/tmp/large mode=0600")
        code, said = end(ansible(lab, guest, *words, ansible_remote_tmp="/tmp"))
        assert code != 0
        assert "No space left on device" in said
        code, said = end(ansible(lab, guest, "-m", "raw", "-a", "df /tmp"))
        assert code == 0
        code, said = end(ansible(lab, guest, "-m", "fetch", "-a", f"src=/etc/passwd dest={tmp_path}/passwd flat=true"))
    finally:
        broke(lab, "disk-heal", guest.name)
    assert (tmp_path / "passwd").read_bytes().startswith(b"root:")


def test_a_pct_that_hangs(lab: Lab) -> None:
    guest = guest_of(lab, "privileged")
    assert end(ansible(lab, guest, "-m", "ping"))[0] == 0
    settings(lab, "startup = 300")
    try:
        code, said = end(ansible(lab, guest, "-m", "ping", ansible_pct_entry_timeout=2))
        assert code == UNREACHABLE
        assert f"pct on {lab.host.name} did not enter container {guest.vmid} within 2 s (process" in said
        assert lab.on_host("pgrep -x pct").stdout == "", "it still hangs there"
    finally:
        settings(lab, "startup = 0")


def test_a_long_command_is_no_pct_that_hangs(lab: Lab) -> None:
    code, _ = end(ansible(lab, guest_of(lab, "privileged"), "-m", "raw", "-a", "sleep 3", ansible_pct_entry_timeout=1))
    assert code == 0


@pytest.mark.parametrize("mode", ["pct", "lxc-attach"])
def test_a_guest_that_has_moved(lab: Lab, mode: str) -> None:
    guest = guest_of(lab, "noname")
    conf = f"/etc/pve/nodes/{lab.host.name}/lxc/{guest.vmid}.conf"
    lab.on_host(f"pct stop {guest.vmid}; mkdir -p /etc/pve/nodes/px9/lxc; mv {conf} /etc/pve/nodes/px9/lxc/")
    try:
        code, said = end(ansible(lab, guest, "-m", "ping", ansible_pct_mode=mode))
    finally:
        lab.on_host(
            f"mv /etc/pve/nodes/px9/lxc/{guest.vmid}.conf {conf}; rm -r /etc/pve/nodes/px9; pct start {guest.vmid}"
        )
    assert code == UNREACHABLE
    assert f"container {guest.vmid} is on node px9, not on {lab.host.name}: set ansible_pct_host to px9" in said


def test_255_is_the_commands_own_and_happens_once(lab: Lab) -> None:
    guest = guest_of(lab, "privileged")
    lab.on_host(f"pct exec {guest.vmid} -- rm -f /run/once")
    words = ("-m", "shell", "-a", "echo once >> /run/once; exit 255")
    code, said = end(ansible(lab, guest, *words, ansible_ssh_retries=3))
    assert (code, "rc=255" in said) == (2, True), said
    assert lab.on_host(f"pct exec {guest.vmid} -- cat /run/once").stdout == "once\n"


def test_a_pct_from_before_keep_env(lab: Lab) -> None:
    guest = guest_of(lab, "privileged")
    known = Path(lab.place.control_path_dir).expanduser()
    settings(lab, "keep-env = no")
    try:
        for _ in range(2):  # finds out, and knows
            code, said = end(ansible(lab, guest, "-m", "command", "-a", "env"))
            assert (code, "SSH_" in said, "HOME=/root" in said) == (0, False, True), said
    finally:
        settings(lab, "keep-env = yes")
    assert [path.unlink() for path in known.glob("*.old-pct")] == [None]


def test_a_user_of_the_hypervisor_who_is_not_root(lab: Lab, tmp_path: Path) -> None:
    """By sudo; and told so where there is none."""
    guest = guest_of(lab, "privileged")
    (tmp_path / "sudo.c").write_text(SUDO, encoding="ascii")
    subprocess.run(["gcc", "-static", "-o", tmp_path / "sudo", tmp_path / "sudo.c"], check=True)
    lab.on_host("useradd -m -s /bin/sh ops; cp -r /root/.ssh /home/ops; chown -R ops /home/ops")
    try:
        code, said = end(ansible(lab, guest, "-m", "ping", ansible_pct_user="ops"))
        assert (code, "the hypervisor has no sudo" in said) == (UNREACHABLE, True), said
        code, said = end(ansible(lab, guest, "-m", "ping", ansible_pct_user="ops", ansible_pct_sudo="false"))
        assert (code, "the login's PATH lacks /usr/sbin" in said) == (UNREACHABLE, True), said
        lab.on_host("cat > /usr/bin/sudo; chmod 4755 /usr/bin/sudo", stdin=(tmp_path / "sudo").read_bytes())
        code, said = end(ansible(lab, guest, "-m", "command", "-a", "id -u", ansible_pct_user="ops"))
        assert (code, said.endswith(">> 0")) == (0, True), said
        code, said = end(ansible(lab, guest_of(lab, "stopped"), "-m", "ping", ansible_pct_user="ops"))
        assert (code, "is not running (pct start" in said) == (UNREACHABLE, True), said
    finally:
        lab.on_host("rm -f /usr/bin/sudo; pkill -KILL -u ops; userdel -r ops")
