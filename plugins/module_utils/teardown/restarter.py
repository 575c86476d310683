# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Who starts an ended process again, and how that is stopped."""

from __future__ import annotations

import os
import re
import typing as t

from ..common.text import command_line, show
from ..proc.attribution import attribute, is_guest_init
from ..proc.table import Process, ancestors
from .match import is_interpreter
from .units import enter

if t.TYPE_CHECKING:
    from .plan import Plan


class Restarter(t.NamedTuple):
    #: What it is, for people.
    what: str
    #: The command that stops it.
    command: str

    @property
    def text(self) -> str:
        return "started again by %s; stop that first: %s" % (self.what, self.command)


def _supervisor(process: Process, container_id: str) -> Restarter | None:
    """Known supervisors, by comm (cut to 15 bytes)."""
    comm, argv = process.comm, process.argv
    name = "%s (pid %d)" % (show(comm), process.pid)
    last = show(argv[-1]) if len(argv) > 1 else "SERVICE"
    if comm.startswith("containerd-shim") or comm == "dockerd":
        return Restarter("Docker", "docker stop %s" % (container_id or "CONTAINER"))
    if comm == "conmon":
        return Restarter("podman", "podman stop %s" % (container_id or "CONTAINER"))
    if comm == "supervisord":
        return Restarter(name, "supervisorctl stop PROGRAM (supervisorctl status names it)")
    if comm == "runsv":
        return Restarter(name, "sv down %s" % last)
    if comm in ("s6-supervise", "supervise"):
        return Restarter(name, "s6-svc -d %s" % last if comm.startswith("s6") else "svc -d %s" % last)
    if comm.startswith("PM2"):
        return Restarter(name, "pm2 stop NAME (pm2 list names it)")
    if comm in ("circusd", "monit", "god", "nodemon", "watchman", "slurmstepd"):
        return Restarter(name, "its own stop command, or kill %d" % process.pid)
    return None


#: What carries sessions, and starts nothing anew.
_CARRIERS = re.compile(r"sshd.*|tmux.*|screen|SCREEN|login|su|sudo|doas|systemd|\(sd-pam\)|init|tini|dumb-init")
_SHELLS = re.compile(r"(?:ba|da|z|k|mk|c|tc|fi)?sh")


def may_restart(process: Process) -> bool:
    """Whether a living parent may start an ended child anew: not what carries sessions, nor a shell in which somebody
    types."""
    if _CARRIERS.fullmatch(process.comm):
        return False
    words = process.argv
    if words and _SHELLS.fullmatch(os.path.basename(words[0].lstrip("-"))):
        return any(not word.startswith("-") for word in words[1:])
    return True


def name_restarter(process: Process, plan: Plan) -> Restarter | None:
    """Who may have started C(process) again; None when nobody is in sight.

    Nearest first: a known supervisor or container runtime above it, a unit that restarts, a living parent that is a
    shell or another program (a loop). Process 1 and we ourselves are none.
    """
    table = plan.survey.table
    found = attribute(process)
    # A guest's unit is stopped in the guest.
    guest = found.container_id if found.container_kind == "lxc" and found.guest_pid != found.host_pid else ""
    chain = [table[pid] for pid in ancestors(table, process.pid) if pid in table and pid > 1]
    # What is above a guest's first process keeps the guest, and no server in it.
    first = next((place for place, above in enumerate(chain) if is_guest_init(above, attribute(above))), len(chain))
    chain = chain[:first]
    targets = plan.target_pids
    for above in chain:
        known = _supervisor(above, found.container_id)
        if known is not None:
            return known
    for key, state in plan.unit_states.items():
        if state.restarts and key.name in (found.unit, found.user_unit) and key.container == guest:
            return Restarter("unit %s (Restart=%s)" % (key, state.restart), " ".join(key.stop_command))
    for above in chain:
        if above.pid in targets or above.pid in plan.survey.own_pids:
            continue
        kind = (
            "a loop in"
            if is_interpreter(os.path.basename(above.argv[0]) if above.argv else above.comm)
            else "its parent"
        )
        return Restarter(
            "%s pid %d (%s)" % (kind, above.pid, command_line(above.argv, 120) or show(above.comm)),
            "kill %d" % above.pid,
        )
    if found.unit.endswith(".service") or found.user_unit:
        unit = found.user_unit or found.unit
        words = enter(guest) if guest else []
        words += ["systemctl", *(["--user"] if found.user_unit else []), "stop", show(unit)]
        return Restarter("unit %s%s" % (show(unit), " in container %s" % guest if guest else ""), " ".join(words))
    return None
