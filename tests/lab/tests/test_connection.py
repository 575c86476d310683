# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The pct connection on real guests of each kind, by a play; by pct and by lxc-attach."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from labkit import inventory
from labkit.client import Lab

HERE = Path(__file__).resolve().parent
ANSIBLE = Path(sys.executable).with_name("ansible-playbook")

# Beside the lab's own inventory: a guest that nobody has, and what the unreachable ones have to say.
EXTRA = """
lab_stopped: {vars: {reason: "container 104 is not running"}}
nowhere:
  hosts:
    ct999: {ansible_connection: cleanslate.inference.pct, ansible_pct_vmid: 999, ansible_pct_host: %s}
  vars: {reason: "%s"}
"""


def play(lab: Lab, tmp_path: Path, mode: str, nobody: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "big").write_bytes(os.urandom(1 << 20) * 3)
    (tmp_path / "extra.yml").write_text(EXTRA % (lab.host.address, nobody), encoding="utf-8")
    argv = [str(ANSIBLE), "-i", str(inventory.folder(lab.place)), "-i", str(tmp_path / "extra.yml")]
    argv += ["-e", f"ansible_pct_mode={mode}", "-e", f"big_file={tmp_path}/big", "-e", f"fetched={tmp_path}/fetched"]
    argv += [str(HERE / "connection.yml")]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(lab.checkout / "ansible.cfg")}
    return subprocess.run(argv, cwd=lab.checkout, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("mode", "nobody"),
    [("pct", "container 999 does not exist on node px1"), ("lxc-attach", "container 999 is not running here")],
)
def test_play(lab: Lab, tmp_path: Path, mode: str, nobody: str) -> None:
    assert lab.command("inventory").returncode == 0
    done = play(lab, tmp_path, mode, nobody)
    assert done.returncode == 0, done.stdout + done.stderr
    sent = (tmp_path / "big").read_bytes()
    running = [guest for guest in lab.host.guests if guest.kind in ("privileged", "unprivileged", "passthrough")]
    for guest in running:
        assert (tmp_path / "fetched" / guest.name).read_bytes() == sent
        show = (
            f"pct exec {guest.vmid} -- sh -c 'stat -c \"%a %U\" \"/root/it'\\''s a \\$file\"; test ! -e /tmp/escaped'"
        )
        assert lab.on_host(show).stdout == "640 root\n"
    assert lab.on_host("ls -A /root/.ansible /tmp/escaped 2>/dev/null").stdout == "", "something went to the hypervisor"


def test_a_hypervisor_that_cannot_be_reached(lab: Lab) -> None:
    """The word of ssh, and unreachable; no guest is accused."""
    argv = [str(ANSIBLE.with_name("ansible")), "-i", str(inventory.folder(lab.place)), "ct101", "-m", "ping"]
    argv += ["-e", "ansible_pct_host=10.99.0.99", "-e", "ansible_ssh_timeout=1", "-e", "ansible_ssh_retries=0"]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(lab.checkout / "ansible.cfg")}
    done = subprocess.run(argv, cwd=lab.checkout, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "10.99.0.99" in done.stdout
    assert "container" not in done.stdout
