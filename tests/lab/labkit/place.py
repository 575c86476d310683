# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where a lab lives, what it is called, and how a command gets into its namespaces.

Everything a lab writes is in one folder (build/lab of the checkout, or CLEANSLATE_LAB_DIR). Its processes see that
folder at /mnt, by a bind mount in their own mount namespace: LXC and overlayfs do not take spaces, colons or commas in
paths, and a checkout may have them. Its network is a network namespace, its processes are in a cgroup; both have names
of their own for each folder, so that labs of several checkouts do not meet.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent  # tests/lab
CHECKOUT = HERE.parent.parent
INSIDE = "/mnt"  # the lab's folder, as its own processes see it

# Argument 1 is the lab's folder, the rest is the command. A pure cgroup2 tree, as on Proxmox, whatever the machine has.
ENTER = """
set -e
mount --bind "$1" /mnt
umount -R -l /sys/fs/cgroup 2>/dev/null || true
mount -t cgroup2 none /sys/fs/cgroup
cd /
shift
exec "$@"
"""


class LabError(Exception):
    """A message for the person at the command line."""


class Place:
    """One lab: its folder and its names."""

    def __init__(self, folder: Path | None = None) -> None:
        wanted = folder or Path(os.environ.get("CLEANSLATE_LAB_DIR") or CHECKOUT / "build" / "lab")
        self.folder = wanted.resolve()
        self.name = "cslab-" + hashlib.sha256(os.fsencode(self.folder)).hexdigest()[:6]
        self.netns = self.name
        self.key = self.folder / "key"
        self.ssh_wrapper = self.folder / "ssh"
        self.known_hosts = self.folder / "known_hosts"
        self.rootfs = self.folder / "rootfs"
        self.fleet_file = self.folder / "fleet.json"
        self.control_path_dir = f"~/.ansible/cp/{self.name}"  # sockets' paths are short, the folder's may be long

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """One change of a lab at a time."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "lock", "w", encoding="utf-8") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LabError(f"another lab command is changing {self.folder}") from None
            yield

    def inside(self, argv: list[str], network: bool = True) -> list[str]:
        """The command line that runs `argv` in the lab's mount namespace, and in its network unless told otherwise."""
        enter = ["unshare", "-m", "--propagation", "private", "sh", "-c", ENTER, "lab", str(self.folder), *argv]
        return ["ip", "netns", "exec", self.netns, *enter] if network else enter

    def run_inside(self, argv: list[str], network: bool = True, check: bool = True) -> subprocess.CompletedProcess[str]:
        return run(self.inside(argv, network), check=check)

    def has_network(self) -> bool:
        return os.path.exists(f"/run/netns/{self.netns}")

    def ssh(self, address: str, options: tuple[str, ...] = ()) -> list[str]:
        """The ssh command line to a hypervisor; it has to run in the lab's network."""
        settings = [
            f"IdentityFile={quoted(self.key)}",
            f"UserKnownHostsFile={quoted(self.known_hosts)}",
            "IdentitiesOnly=yes",
            "BatchMode=yes",
            "ConnectTimeout=5",
            *options,
        ]
        return ["ssh", "-F", "none", *(word for setting in settings for word in ("-o", setting)), f"root@{address}"]


def quoted(path: Path) -> str:
    """A path in an ssh option: ssh splits such values at spaces."""
    return f'"{path}"'


def run(argv: list[str], check: bool = True, **options) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; with `check` its failure is a LabError that shows what it said.

    Output goes through a file: a daemon that the command leaves behind keeps a pipe open for ever.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, text=True, check=False, **options
        )
        output.seek(0)
        done.stdout = output.read()
    if check and done.returncode != 0:
        shown = " ".join(argv[-6:])
        raise LabError(f"… {shown}\nended with {done.returncode}:\n{done.stdout.strip()}")
    return done
