# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Private to this collection: no stable interface.
"""How a command gets from a hypervisor's shell into a guest, and what its end means. Pure: builds words, reads results.

Facts: Proxmox's `pct exec` is `lxc-attach` with checks before it (pve-container, PVE/CLI/pct.pm); its failures end with
2 or 255, a command's own code is passed through, and ssh ends with 255 itself. So the code alone does not tell whose it
is. Everything that enters a guest therefore reports its code on stderr, behind a token that only this connection knows:
with a report, the code is the command's; without one, the command never ended there, and the text says why.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
import shlex
from collections.abc import Callable

GUEST_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Words: the command, the token. HOME comes from the guest's own user database; a login by ssh would start there, too.
REPORTING = (
    f"HOME=~root PATH={GUEST_PATH} USER=root LOGNAME=root; export HOME PATH USER LOGNAME; cd 2>/dev/null; unset OLDPWD;"
    ' /bin/sh -c "$0"; echo "$1 $?" >&2'
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of one call. `returncode` is the command's own; None when it never reported one, and `problem` says why.

    `lost` is True when it was ssh that failed, so that a retry may help.
    """

    returncode: int | None
    stdout: bytes
    stderr: bytes
    problem: str = ""
    lost: bool = False


class Entry:
    """A way into the guests of a hypervisor. One object for one guest.

    vmid: the guest's id, digits. sudo: enter by `sudo -n`. Raises ValueError for anything else than an id.
    """

    #: Texts by which this way says that it failed: pattern → what it means, with {vmid} and the pattern's groups.
    problems: tuple[tuple[str, str], ...] = ()

    def __init__(self, vmid: str, sudo: bool = False) -> None:
        if not re.fullmatch(r"[1-9][0-9]{2,8}", vmid):
            raise ValueError(f"not a container id: {vmid!r}")
        self.vmid = vmid
        self.sudo = sudo
        self.token = f"cleanslate-{secrets.token_hex(8)}"

    def enter(self) -> list[str]:
        """The words before the guest's own command."""
        raise NotImplementedError

    def line(self, command: str) -> str:
        """The line for the hypervisor's shell that runs `command` by the guest's /bin/sh; quoted once, parsed once."""
        sudo = ["sudo", "-n"] if self.sudo else []
        return shlex.join([*sudo, *self.enter(), "/bin/sh", "-c", REPORTING, command, self.token])

    def outcome(self, returncode: int, stdout: bytes, stderr: bytes) -> Outcome:
        """What the end of ssh means: its code and its output, as bytes. A terminal mixes stderr into stdout."""
        report = re.compile(re.escape(self.token.encode()) + rb" (\d+)\r*\n")  # each terminal on the way adds a \r
        for output in (stderr, stdout):
            found = list(report.finditer(output))
            if found:
                last = found[-1]
                kept = output[: last.start()] + output[last.end() :]
                rest = (stdout, kept) if output is stderr else (kept, stderr)
                return Outcome(int(last[1]), *rest)
        text = (stderr + b"\n" + stdout).decode("utf-8", "replace")
        return Outcome(None, stdout, stderr, *self._why(returncode, text))

    def _why(self, returncode: int, text: str) -> tuple[str, bool]:
        for pattern, meaning in (*self.problems, *COMMON_PROBLEMS):
            found = re.search(pattern, text, flags=re.MULTILINE)
            if found:
                return meaning.format(*found.groups(), vmid=self.vmid), False
        if returncode == 255:
            return text.strip(), True
        problem = f"the command's end was not reported (code {returncode}), the guest may have stopped: {text.strip()}"
        return problem, False


COMMON_PROBLEMS = (
    (r"sudo: (a (?:terminal|password) is required.*)$", "sudo -n on the hypervisor: {0}"),
    (r"(?:pct|lxc-attach): (?:command )?not found|sudo: (?:pct|lxc-attach): command not found",
     "this host has no pct: it is no Proxmox VE node, or the login's PATH lacks /usr/sbin"),
    (r'Failed to exec "/bin/sh"', "container {vmid} has no /bin/sh"),
)  # fmt: skip


class PctExec(Entry):
    """By Proxmox's own `pct exec`, with an environment of the guest's own (pve-container 5.0.9 and later)."""

    problems = (
        (r"^container '\d+' not running!", "container {vmid} is not running (pct start {vmid})"),
        (r"^Configuration file 'nodes/([^/']+)/lxc/\d+\.conf' does not exist",
         "container {vmid} does not exist on node {0}"),
        (r"^ipcc_send_rec", "pct needs root on the hypervisor: log in as root, or set ansible_pct_sudo"),
        (r"^(400 .*)$", "pct refuses the call: {0}"),
    )  # fmt: skip

    def enter(self) -> list[str]:
        return ["pct", "exec", self.vmid, "--keep-env", "0", "--"]


class LxcAttach(Entry):
    """By `lxc-attach` itself: without pct's start-up time, and without its look at the configuration."""

    problems = (
        (r"^lxc-attach: \d+: .*(?:Failed to get init pid|Connection refused)",
         "container {vmid} is not running here (pct start {vmid})"),
        (r"^lxc-attach: \d+: .*[Pp]ermission denied",
         "lxc-attach needs root on the hypervisor: log in as root, or set ansible_pct_sudo"),
    )  # fmt: skip

    def enter(self) -> list[str]:
        return ["lxc-attach", "-n", self.vmid, "--clear-env", "--"]


MODES: dict[str, Callable[..., Entry]] = {"pct": PctExec, "lxc-attach": LxcAttach}
