# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The pct connection on real guests of each kind, by plays: what it does, and what it says of guests that are gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from labkit import inventory
from labkit.client import Lab

HERE = Path(__file__).resolve().parent
CONTRACT = HERE.parents[1] / "integration/targets/connection_pct"
PLAYBOOK = Path(sys.executable).with_name("ansible-playbook")

# Beside the lab's own inventory: the guests under test, a guest that nobody has, and what the unreachable ones say.
EXTRA = """
contract: {hosts: {%s: {}}}
connection_contract: {hosts: {%s: {}}}
gone:
  hosts:
    %s: {reason: "container %s is not running .pct start"}
    ct999:
      reason: "container 999 does not exist on node %s, nor on another"
      ansible_connection: cleanslate.inference.pct
      ansible_pct_vmid: 999
      ansible_pct_host: %s
"""


def play(lab: Lab, tmp_path: Path, kinds: list[str], playbook: Path, *words: str) -> subprocess.CompletedProcess[str]:
    names = ": {}, ".join(guest.name for guest in lab.host.guests if guest.kind in kinds)
    stopped = next(guest for guest in lab.host.guests if guest.kind == "stopped")
    extra = EXTRA % (names, names, stopped.name, stopped.vmid, lab.host.name, lab.host.address)
    (tmp_path / "extra.yml").write_text(extra, encoding="utf-8")
    argv = [str(PLAYBOOK), "-i", str(inventory.folder(lab.place)), "-i", str(tmp_path / "extra.yml"), *words]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(lab.checkout / "ansible.cfg")}
    done = subprocess.run(
        [*argv, str(playbook)], cwd=lab.checkout, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.mark.parametrize(
    ("mode", "kinds", "tags"),
    [("pct", ["privileged", "unprivileged", "passthrough"], "all"), ("lxc-attach", ["unprivileged"], "brief")],
)
def test_play(lab: Lab, tmp_path: Path, mode: str, kinds: list[str], tags: str) -> None:
    assert lab.command("inventory").returncode == 0
    (tmp_path / "big").write_bytes(os.urandom(1 << 20) * 3)
    files = ["-e", f"big_file={tmp_path}/big", "-e", f"fetched={tmp_path}/fetched"]
    play(lab, tmp_path, kinds, HERE / "connection.yml", "-e", f"ansible_pct_mode={mode}", "--tags", tags, *files)
    sent = (tmp_path / "big").read_bytes()
    for guest in (guest for guest in lab.host.guests if guest.kind in kinds):
        assert (tmp_path / "fetched" / guest.name).read_bytes() == sent
        show = (
            f"pct exec {guest.vmid} -- sh -c 'stat -c \"%a %U\" \"/root/it'\\''s a \\$file\"; test ! -e /tmp/escaped;"
            " ls /run/cleanslate-pct.* 2>/dev/null'"
        )
        assert lab.on_host(show).stdout == "640 root\n"
    assert lab.on_host("ls -A /root/.ansible /tmp/escaped 2>/dev/null").stdout == "", "something went to the hypervisor"


@pytest.mark.parametrize("pipelining", ["true", "false"])
def test_contract(lab: Lab, tmp_path: Path, pipelining: str) -> None:
    words = ("-e", f"ansible_pipelining={pipelining}")
    play(lab, tmp_path, ["unprivileged"], CONTRACT / "contract.yml", *words)


def test_a_large_file_passes_through_little_memory(lab: Lab, tmp_path: Path) -> None:
    """Both ways, in a process of its own, whose peak is what Ansible itself needs."""
    guest = next(guest for guest in lab.host.guests if guest.kind == "privileged")
    with open(tmp_path / "source", "wb") as source:
        source.truncate(256 << 20)
    words = [str(tmp_path / "source"), str(tmp_path / "back"), str(inventory.folder(lab.place)), guest.name]
    argv = [sys.executable, str(HERE / "transfer.py"), *words]
    environment = {**os.environ, "ANSIBLE_CONFIG": str(lab.checkout / "ansible.cfg")}
    done = subprocess.run(argv, cwd=lab.checkout, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = (int(word) for word in done.stdout.split()[-2:])
    assert after - before < 16 << 10, f"{before} KiB before, {after} KiB after"
