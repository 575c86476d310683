# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""The way into a container from its hypervisor: C(pct), what its failures mean, and a command's own exit code.

Facts (pve-container, PVE/CLI/pct.pm): C(pct exec) becomes lxc-attach, hands its environment on, fails with 2 or 255
itself and passes a command's code through, so that a code alone does not tell whose it is. Commands here report theirs
on stderr behind a token; no report means that the command never ended in the container.
"""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import typing as t

from ..common.errors import CleanslateError
from ..common.text import show
from .cluster import running_here
from .conf import GuestConf, parse_conf
from .host import Place
from .program import Ended, run
from .wanted import Command

#: Words: token, run or look, folder, creates, removes, the command's own. Every word is quoted, none is parsed again.
SCRIPT = """t=$1 mode=$2 dir=$3 creates=$4 removes=$5
shift 5
HOME=~root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin USER=root LOGNAME=root
export HOME PATH USER LOGNAME
if [ -n "$dir" ]; then cd -- "$dir" 2>/dev/null || { echo "$t nodir" >&2; exit 0; }; else cd 2>/dev/null; fi
unset OLDPWD
there() { [ -e "$1" ] || [ -L "$1" ]; }
if [ -n "$creates" ] && there "$creates"; then echo "$t creates" >&2; exit 0; fi
if [ -n "$removes" ] && ! there "$removes"; then echo "$t removes" >&2; exit 0; fi
if [ "$mode" = look ]; then echo "$t would" >&2; exit 0; fi
"$@"
echo "$t $?" >&2
"""
#: Ends with 0 when the container's own services have started; systemd says so itself, others have no such thing.
BOOTED = """case $(readlink -f /sbin/init) in *systemd*) ;; *) exit 0 ;; esac
s=$(systemctl is-system-running --wait 2>/dev/null)
[ -n "$s" ] || s=$(systemctl is-system-running 2>/dev/null)
echo "$s"
case $s in running|degraded) exit 0 ;; *) exit 1 ;; esac
"""

#: What pct says -> code and meaning, tried in this order.
_PROBLEMS = (
    (r"^CT is locked \(([^)]*)\)", "locked", "it is locked (%s): wait for its end, or `pct unlock {vmid}`"),
    (r"^Device (\S+) does not exist", "missing_device", "the host has no %s, which its configuration names"),
    (r"^ipcc_send_rec", "not_root", "pct needs root on the hypervisor: become root"),
    (r"^container '\d+' not running!|^(?:CT|VM) \d+ not running", "not_running", "it does not run"),
    (r"^Configuration file 'nodes/[^/']+/lxc/\d+\.conf' does not exist", "missing", "it is not on this node"),
    (r'Failed to exec "/bin/sh"', "no_shell", "it has no /bin/sh"),
)


class PctProblem(Exception):
    """Why something with one container failed: a code for scripts and a sentence for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclasses.dataclass(frozen=True)
class Whereabouts:
    #: C(here), C(elsewhere), C(vm) or C(missing).
    kind: str
    node: str = ""
    conf: GuestConf | None = None


@dataclasses.dataclass(frozen=True)
class Ran:
    """What became of a command: its C(code), or why it was not run (C(creates), C(removes), C(would))."""

    code: int | None
    skipped: str
    stdout: str
    stderr: str
    cut: bool


def explain(ended: Ended, vmid: int) -> PctProblem:
    """What a failed pct means."""
    for pattern, code, meaning in _PROBLEMS:
        found = re.search(pattern, ended.text, re.MULTILINE)
        if found:
            text = meaning % show(found.group(1)) if "%s" in meaning else meaning
            return PctProblem(code, text.format(vmid=vmid))
    return PctProblem("error", show(ended.text[-2000:]) or "pct ended with %d and said nothing" % ended.returncode)


class Machine:
    """The hypervisor as pct_exec uses it; tests put another one in its place."""

    def __init__(self, place: Place | None = None, program: str = "pct") -> None:
        self.place = place or Place()
        self.program = program

    def check(self) -> None:
        """Raise CleanslateError where nothing could be done at all."""
        if not os.path.isdir(self.place.path("/etc/pve/nodes")):
            raise CleanslateError(
                "There is no /etc/pve/nodes: this is no Proxmox VE node, or its cluster file system is down. Name "
                "hypervisors as hosts."
            )
        if os.geteuid() != 0:
            raise CleanslateError("pct needs root on the hypervisor: become root.")

    @property
    def node(self) -> str:
        return self.place.read("/proc/sys/kernel/hostname").strip().split(".")[0]

    def find(self, vmid: int) -> Whereabouts:
        """Where in the cluster this id is."""
        for node in [self.node, *self.place.names("/etc/pve/nodes")]:
            path = "/etc/pve/nodes/%s/lxc/%d.conf" % (node, vmid)
            if os.path.exists(self.place.path(path)):
                kind = "here" if node == self.node else "elsewhere"
                return Whereabouts(kind, node, parse_conf(self.place.read(path)))
            if os.path.exists(self.place.path("/etc/pve/nodes/%s/qemu-server/%d.conf" % (node, vmid))):
                return Whereabouts("vm", node)
        return Whereabouts("missing")

    def runs(self, vmid: int) -> bool:
        """As Proxmox VE itself tells, without the start-up time of pct."""
        return vmid in running_here(self.place.read("/proc/net/unix"))

    def pct(self, words: t.Sequence[str], stdin: bytes = b"", timeout: float = 600.0) -> Ended:
        """Run pct. Raises CleanslateError when there is none."""
        try:
            return run([self.program, *words], stdin, timeout)
        except FileNotFoundError:
            raise CleanslateError("This node has no pct: it is no Proxmox VE node.") from None

    def attach(self, vmid: int, command: Command, look: bool = False) -> Ran:
        """Run a command in a container, or with C(look) only see whether it would run. Raises PctProblem."""
        token = "cleanslate-" + secrets.token_hex(8)
        words = [token, "look" if look else "run", command.chdir, command.creates, command.removes, *command.argv]
        ended = self.pct(
            ["exec", str(vmid), "--", "/bin/sh", "-c", SCRIPT, "cleanslate", *words],
            b"" if look else command.stdin.encode("utf-8", "surrogateescape"),
            command.timeout,
        )
        stderr = ended.stderr.decode("utf-8", "replace")
        reports = list(re.finditer(re.escape(token) + r" (\w+)\n?", stderr))
        if not reports:
            if ended.timed_out:
                raise PctProblem("command_timeout", "it did not end within %g s and was ended" % command.timeout)
            raise explain(ended, vmid)
        said = reports[-1].group(1)
        if said == "nodir":
            raise PctProblem("no_folder", "the container has no folder %s" % show(command.chdir))
        return Ran(
            int(said) if said.isdigit() else None,
            "" if said.isdigit() else said,
            ended.stdout.decode("utf-8", "replace"),
            stderr[: reports[-1].start()] + stderr[reports[-1].end() :],
            ended.cut,
        )
