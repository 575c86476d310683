# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Private to this collection: no stable interface.
"""What a hypervisor knows about a guest that could not be entered, and what to do about it.

Asked only after a failure, by one more command. Facts: pmxcfs shows the configurations of all nodes of a cluster under
/etc/pve/nodes on each of them; /etc/pve/local leads to the node's own; snapshots are sections in brackets; a guest's
cgroup is lxc/ID (pve-container), and gone when it has stopped.
"""

from __future__ import annotations

import dataclasses
import re
import shlex

from .guest_entry import Cause, Outcome

# Words: the guest's id, the token of the call that is looked for, whether to end it. A pct that has not become
# lxc-attach yet hangs on its way. Only pct's own command lines are read: reading that of a process that hangs in a
# driver would hang, too.
LOOK = """v=$1 t=$2 e=$3
for f in /etc/pve/nodes/*/lxc/$v.conf /etc/pve/nodes/*/qemu-server/$v.conf; do [ -e "$f" ] && echo "at $f"; done
echo "here $(readlink /etc/pve/local)"
sed -n "/^\\[/q;s/^lock: */lock /p" "/etc/pve/local/lxc/$v.conf" 2>/dev/null
c=/sys/fs/cgroup
if [ -e "$c/lxc/$v/cgroup.events" ]; then sed "s/^/cgroup /" "$c/lxc/$v/cgroup.events"
elif [ -e "$c/cgroup.controllers" ]; then echo "cgroup populated 0"; fi
for p in $(pgrep -x pct); do
tr "\\0" "\\n" <"/proc/$p/cmdline" 2>/dev/null | grep -q -x -e "$t" || continue
read -r z <"/proc/$p/stat"; set -- $z; echo "pct $p $3"; [ "$e" = yes ] && kill "$p"
done; :"""


@dataclasses.dataclass(frozen=True)
class View:
    """here: the node that was asked, empty when unknown. nodes: those with such a container. machines: those with a
    virtual machine of that id. lock: the reason, or empty. running, frozen: None when the hypervisor does not say.
    waiting: pid and state of a pct that has not entered the guest."""

    here: str = ""
    nodes: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()
    lock: str = ""
    running: bool | None = None
    frozen: bool | None = None
    waiting: tuple[int, str] | None = None


def look(vmid: str, token: str, sudo: bool, end: bool = False) -> str:
    """The line for the hypervisor's shell. With `end`, a pct with this token that has not entered the guest is ended.

    Where sudo allows nothing but pct itself, the parts that need root are left out.
    """
    plain = shlex.join(["/bin/sh", "-c", LOOK, "look", vmid, token, "yes" if end else "no"])
    return f"sudo -n {plain} 2>/dev/null || {plain}" if sudo else plain


def read(text: str) -> View:
    """What `look` printed."""
    said = [line.partition(" ")[::2] for line in text.splitlines()]
    events = dict(value.partition(" ")[::2] for key, value in said if key == "cgroup")
    places = [re.fullmatch(r"/etc/pve/nodes/([^/]+)/([^/]+)/\d+\.conf", value) for key, value in said if key == "at"]
    waiting = next((value.split() for key, value in said if key == "pct"), None)
    return View(
        here=next((value.rpartition("/")[2] for key, value in said if key == "here"), ""),
        nodes=tuple(place[1] for place in places if place and place[2] == "lxc"),
        machines=tuple(place[1] for place in places if place and place[2] == "qemu-server"),
        lock=next((value for key, value in said if key == "lock"), ""),
        running={"0": False, "1": True}.get(events.get("populated", "")),
        frozen={"0": False, "1": True}.get(events.get("frozen", "")),
        waiting=(int(waiting[0]), waiting[1]) if waiting else None,
    )


def explain(vmid: str, outcome: Outcome, view: View) -> str:
    """The problem of an outcome, told with what the hypervisor knows."""
    if outcome.cause is Cause.ENDED:
        return _ended(vmid, outcome, view)
    if outcome.cause in (Cause.ABSENT, Cause.STOPPED):
        return _elsewhere(vmid, view) or _not_running(vmid, outcome, view)
    return outcome.problem


def _elsewhere(vmid: str, view: View) -> str:
    if not view.here or view.here in view.nodes:
        return ""
    if view.nodes:
        node = view.nodes[0]
        mend = f"set ansible_pct_host to {node}, or renew the inventory"
        return f"container {vmid} is on node {node}, not on {view.here}: {mend}"
    if view.machines:
        return f"{vmid} is a virtual machine (on node {view.machines[0]}), not a container"
    return f"container {vmid} does not exist on node {view.here}, nor on another node of its cluster"


def _not_running(vmid: str, outcome: Outcome, view: View) -> str:
    if outcome.cause is not Cause.STOPPED:
        return outcome.problem
    if view.lock:
        mend = f"when that is over (or pct unlock {vmid}): pct start {vmid}"
        return f"container {vmid} is not running and is locked ({view.lock}); {mend}"
    return f"container {vmid} is not running (pct start {vmid})"


def _ended(vmid: str, outcome: Outcome, view: View) -> str:
    elsewhere = _elsewhere(vmid, view)
    if elsewhere:
        return f"container {vmid} went away while the command ran: {elsewhere}"
    if view.running is False:
        lock = f"; it is locked ({view.lock})" if view.lock else ""
        return f"container {vmid} stopped while the command ran{lock} (pct start {vmid})"
    runs = f"container {vmid} {'runs' if view.running else 'may have stopped'}"
    return f"{outcome.problem} ({runs}: the command's shell was killed, or the container has restarted)"


def hung(vmid: str, seconds: float, view: View) -> str:
    """What to say of a pct that did not enter the guest in time."""
    pid, state = view.waiting or (0, "?")
    where = view.here or "the hypervisor"
    why = "a storage or the cluster's file system (/etc/pve) that does not answer, or a very busy machine"
    return f"pct on {where} did not enter container {vmid} within {seconds:g} s (process {pid}, state {state}): {why}"
