# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A running lab as tests use it: shell lines on its hypervisor."""

from __future__ import annotations

import dataclasses
import subprocess

from . import machine
from .place import CHECKOUT, HERE, Place

MULTIPLEXED = ("ControlMaster=auto", "ControlPersist=60")


@dataclasses.dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


class Lab:
    """The lab under test, reached as a person reaches it: by ssh to its hypervisor."""

    def __init__(self, sockets: str) -> None:
        self.place = Place()
        self.host = machine.the_fleet(self.place)[0]
        self.checkout = CHECKOUT
        self._ssh = self.place.ssh(self.host.address, MULTIPLEXED + (f"ControlPath={sockets}/%C",))
        self._ssh[0] = str(self.place.ssh_wrapper)

    def vmid(self, kind: str) -> int:
        return next(guest.vmid for guest in self.host.guests if guest.kind == kind)

    def on_host(self, line: str, stdin: bytes = b"", seconds: float = 90) -> Done:
        """Run a shell line on the hypervisor. Its words may name guests by kind: `{privileged}`."""
        for guest in self.host.guests:
            line = line.replace(f"{{{guest.kind}}}", str(guest.vmid))
        done = subprocess.run([*self._ssh, "--", line], input=stdin, capture_output=True, timeout=seconds, check=False)
        return Done(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))

    def command(self, *words: str) -> Done:
        """Run `tests/lab/lab WORDS`."""
        done = subprocess.run([str(HERE / "lab"), *words], capture_output=True, text=True, timeout=180, check=False)
        return Done(done.returncode, done.stdout, done.stderr)

    def close(self) -> None:
        subprocess.run([*self._ssh[:-1], "-O", "exit", self._ssh[-1]], capture_output=True, check=False)
