# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""testinfra for the hosts of the lab: `lab://px1`, `lab://ct101`, or a group as in inventories/lab (`lab://gpu_nodes`).

Importing this module makes them known. A command takes 0.1 s; by way of the `ansible` program, which is what testinfra
does with a connection that it does not know, it takes 0.9 s.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import testinfra.backend
from testinfra.backend import base

sys.path.insert(0, str(Path(__file__).resolve().parent))

from labkit import inventory, machine
from labkit.place import Place

MULTIPLEXED = ("ControlMaster=auto", "ControlPersist=60")


class LabBackend(base.BaseBackend):
    """Runs commands on a hypervisor by ssh, in a guest by its hypervisor's pct exec."""

    NAME = "lab"

    def __init__(self, name: str, *args: Any, **options: Any) -> None:
        place = Place()
        fleet = machine.the_fleet(place)
        guests = {guest.name: (host, guest) for host in fleet for guest in host.guests}
        host, guest = guests.get(name) or (next(host for host in fleet if host.name == name), None)
        sockets = Path(place.control_path_dir).expanduser()
        sockets.mkdir(parents=True, exist_ok=True, mode=0o700)
        multiplexed = (*MULTIPLEXED, f"ControlPath={sockets}/testinfra-%C")
        self._ssh = [str(place.ssh_wrapper), *place.ssh(host.address, multiplexed)[1:], "--"]
        self._enter = ["pct", "exec", str(guest.vmid), "--keep-env", "0", "--", "/bin/sh", "-c"] if guest else []
        super().__init__(name, *args, **options)

    @classmethod
    def get_hosts(cls, host: str, **options: Any) -> list[str]:
        place = Place()
        groups = inventory.inventory(place, machine.the_fleet(place))["all"]["children"]
        return list(groups[host]["hosts"]) if host in groups else [host]

    def run(self, command: str, *args: str, **options: Any) -> base.CommandResult:
        line = self.get_command(command, *args)
        if self._enter:
            line = shlex.join([*self._enter, line])
        done = self.run_local(shlex.join([*self._ssh, line]))
        if done.rc == 255:
            raise RuntimeError(done)  # ssh or pct, not the command
        return done


testinfra.backend.BACKENDS[LabBackend.NAME] = f"{__name__}.{LabBackend.__name__}"
