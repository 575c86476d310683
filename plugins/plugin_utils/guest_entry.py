# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Private to this collection: no stable interface.
"""How a command gets from a hypervisor's shell into a guest, and what its end means. Pure: builds words, reads results.

Facts: Proxmox's `pct exec` is `lxc-attach` with checks before it (pve-container, PVE/CLI/pct.pm); its failures end with
2 or 255, a command's own code is passed through, and ssh ends with 255 itself. So the code alone does not tell whose it
is. Everything that enters a guest therefore reports on stderr, behind a token that only this connection knows: that it
has begun, and at the end its code. With an end, the code is the command's. With only a beginning, the command ran and
something between us was lost. With neither, it never ran, and the text says why.

Losing ssh does not end what runs in the guest. Each command therefore leaves a mark in the guest's /run while it runs,
with the process that waits for it on the control node; the next one reads the marks.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import secrets
import shlex
from collections.abc import Callable

GUEST_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MARK = "/run/cleanslate-pct"

# Words: the command, the token, who waits for it. HOME comes from the guest's own user database; a login by ssh would
# start there, too. Only what the shell itself can do, but for removing the mark: a process costs a millisecond, and one
# that reads other processes' command lines can hang on one that hangs in a driver. Of a stat line: 4 is the parent, 22
# the start time; names of shells have no spaces.
REPORTING = f"""HOME=~root PATH={GUEST_PATH} USER=root LOGNAME=root
export HOME PATH USER LOGNAME; cd 2>/dev/null; unset OLDPWD
t=$1 o=$2 l=
{{ for m in {MARK}.*; do
[ -s "$m" ] || continue
p=${{m##*.}}; read -r s w <"$m"
if read -r z <"/proc/$p/stat" && set -- $z && [ "${{22}}" = "$s" ]; then
u=$4 c=$p n=sh
while k=; read -r k z <"/proc/$c/task/$c/children"; [ -n "$k" ]; do c=$k; done
read -r n <"/proc/$c/comm"; l="$l$t left $p $u $c $w $n
"
else rm -f "$m"; fi; done
read -r z <"/proc/$$/stat"; set -- $z; echo "${{22}} $o" >{MARK}.$$
}} 2>/dev/null
echo "$l$t in $$" >&2
/bin/sh -c "$0"; r=$?; rm -f {MARK}.$$; echo "$t $r" >&2"""

# Commands that report how much they moved. A file that changes meanwhile has two sizes; one in /proc has none.
RECEIVE = '{{ cat >{path}; }} && if [ -f {path} ]; then echo "{token} size" $(wc -c <{path}) >&2; fi'
SEND = """a=; if [ -f {path} ] && [ -s {path} ]; then a=$(wc -c <{path}); fi
cat <{path} || exit 1
if [ -n "$a" ]; then echo "{token} size" $a $(wc -c <{path}) >&2; fi"""


class Cause(enum.Enum):
    """Why a command never reported its end."""

    NONE = "it did"
    LOST = "ssh failed before the command began: another try may help and does no harm"
    CUT = "ssh failed while the command ran: another try would run it twice"
    ENDED = "the command began, and ended without a word"
    STOPPED = "the guest does not run here"
    ABSENT = "the guest is not on this node"
    OLD_PCT = "this pct cannot give a clean environment"
    OTHER = "anything else on the hypervisor"


@dataclasses.dataclass(frozen=True)
class Left:
    """A command of an earlier connection that still runs: its shell's pid in the guest, that shell's parent (0: what
    entered the guest, 1: that is gone), the innermost process below it and its name, and who waited for it."""

    pid: int
    parent: int
    innermost: int
    owner: str
    name: str


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of one call. `returncode` is the command's own; None when it never reported one, and `problem` says why.

    begun: the pid of its shell in the guest, None when it never began. sizes: bytes, as RECEIVE and SEND report them.
    """

    returncode: int | None
    stdout: bytes
    stderr: bytes
    problem: str = ""
    cause: Cause = Cause.NONE
    begun: int | None = None
    left: tuple[Left, ...] = ()
    sizes: tuple[int, ...] = ()


class Entry:
    """A way into the guests of a hypervisor. One object for one guest.

    vmid: the guest's id, digits. sudo: enter by `sudo -n`. owner: who waits, one word. Raises ValueError for anything
    else than an id.
    """

    #: Texts by which this way says that it failed: pattern → what it means, with {vmid} and the pattern's groups.
    problems: tuple[tuple[str, Cause, str], ...] = ()

    def __init__(self, vmid: str, sudo: bool = False, owner: str = "-") -> None:
        if not re.fullmatch(r"[1-9][0-9]{2,8}", vmid):
            raise ValueError(f"not a container id: {vmid!r}")
        self.vmid = vmid
        self.sudo = sudo
        self.owner = owner
        self.token = f"cleanslate-{secrets.token_hex(8)}"

    def enter(self) -> list[str]:
        """The words before the guest's own command."""
        raise NotImplementedError

    def line(self, command: str) -> str:
        """The line for the hypervisor's shell that runs `command` by the guest's /bin/sh; quoted once, parsed once."""
        sudo = ["sudo", "-n"] if self.sudo else []
        return shlex.join([*sudo, *self.enter(), "/bin/sh", "-c", REPORTING, command, self.token, self.owner])

    def receive(self, path: str) -> str:
        """The command that writes its input to a file of the guest."""
        return RECEIVE.format(path=shlex.quote(path), token=self.token)

    def send(self, path: str) -> str:
        """The command that writes a file of the guest to its output."""
        return SEND.format(path=shlex.quote(path), token=self.token)

    def outcome(self, returncode: int, stdout: bytes, stderr: bytes) -> Outcome:
        """What the end of ssh means: its code and its output, as bytes. A terminal mixes stderr into stdout."""
        # Each terminal on the way adds a \r.
        report = re.compile(re.escape(self.token.encode()) + rb" (\d+|in \d+|left [^\r\n]*|size[ \d]*)\r*\n")
        said = [found[1].decode("utf-8", "replace") for found in report.finditer(stdout + b"\n" + stderr)]
        out, err = (report.sub(b"", output) for output in (stdout, stderr))
        seen = Outcome(
            None,
            out,
            err,
            begun=next((int(words.split()[1]) for words in said if words.startswith("in ")), None),
            left=tuple(left_behind(words) for words in said if words.startswith("left ")),
            sizes=next((numbers(words) for words in said if words.startswith("size")), ()),
        )
        codes = [int(words) for words in said if words.isdigit()]
        if codes and returncode == 255:
            # Nothing that enters a guest ends with 255 once the command has ended: it is ssh that broke, in the end.
            problem = f"the connection was lost as the command ended (code {codes[-1]}): its output may be incomplete"
            return dataclasses.replace(seen, problem=problem, cause=Cause.CUT)
        if codes:
            return dataclasses.replace(seen, returncode=codes[-1])
        text = (err + b"\n" + out).decode("utf-8", "replace").strip()
        problem, cause = self._why(returncode, text, seen.begun)
        return dataclasses.replace(seen, problem=problem, cause=cause)

    def _why(self, returncode: int, text: str, begun: int | None) -> tuple[str, Cause]:
        if begun is not None:
            if returncode == 255:
                problem = "the connection was lost while the command ran; it may still run in container"
                return f"{problem} {self.vmid} as process {begun}: {text}", Cause.CUT
            return f"the command's end was not reported (code {returncode}): {text}", Cause.ENDED
        for pattern, cause, meaning in (*self.problems, *COMMON_PROBLEMS):
            found = re.search(pattern, text, flags=re.MULTILINE)
            if found:
                return meaning.format(*found.groups(), vmid=self.vmid), cause
        if returncode == 255:
            return text, Cause.LOST
        return f"container {self.vmid} could not be entered (code {returncode}): {text}", Cause.OTHER


def left_behind(words: str) -> Left:
    """`left PID PARENT INNERMOST OWNER NAME`; the name may have spaces."""
    _left, pid, parent, innermost, owner, *name = words.split(" ", 5)
    return Left(int(pid), int(parent), int(innermost), owner, "".join(name))


def numbers(words: str) -> tuple[int, ...]:
    return tuple(int(word) for word in words.split()[1:])


COMMON_PROBLEMS = (
    (r"sudo: (a (?:terminal|password) is required.*)$", Cause.OTHER, "sudo -n on the hypervisor: {0}"),
    (r"^(.*is not (?:in the sudoers file|allowed to execute).*)$", Cause.OTHER, "sudo -n on the hypervisor: {0}"),
    (r"(?:^|[ :])sudo: (?:command )?not found", Cause.OTHER,
     "the hypervisor has no sudo: log in as root (ansible_pct_user)"),
    (r"(?:pct|lxc-attach): (?:command )?not found|sudo: (?:pct|lxc-attach): command not found", Cause.OTHER,
     "this host has no pct: it is no Proxmox VE node, or the login's PATH lacks /usr/sbin"),
    (r'Failed to exec "/bin/sh"', Cause.OTHER, "container {vmid} has no /bin/sh"),
)  # fmt: skip


class PctExec(Entry):
    """By Proxmox's own `pct exec`, with an environment of the guest's own (pve-container 5.0.9 and later)."""

    problems = (
        (r"^container '\d+' not running!", Cause.STOPPED, "container {vmid} is not running (pct start {vmid})"),
        (r"^Configuration file 'nodes/([^/']+)/lxc/\d+\.conf' does not exist", Cause.ABSENT,
         "container {vmid} does not exist on node {0}"),
        (r"^ipcc_send_rec", Cause.OTHER, "pct needs root on the hypervisor: log in as root, or set ansible_pct_sudo"),
        (r"^Unknown option: keep-env", Cause.OLD_PCT, "this pct has no --keep-env"),
        (r"^(400 .*)$", Cause.OTHER, "pct refuses the call: {0}"),
    )  # fmt: skip

    def enter(self) -> list[str]:
        return ["pct", "exec", self.vmid, "--keep-env", "0", "--"]


class OldPctExec(PctExec):
    """By a `pct exec` that hands on the hypervisor's environment; the guest's own `env` takes it away again."""

    def enter(self) -> list[str]:
        return ["pct", "exec", self.vmid, "--", "/usr/bin/env", "-i", "container=lxc", "TERM=linux"]


class LxcAttach(Entry):
    """By `lxc-attach` itself: without pct's start-up time, and without its look at the configuration."""

    problems = (
        (r"^lxc-attach: \d+: .*(?:Failed to get init pid|Connection refused)", Cause.STOPPED,
         "container {vmid} is not running here (pct start {vmid})"),
        (r"^lxc-attach: \d+: .*[Pp]ermission denied", Cause.OTHER,
         "lxc-attach needs root on the hypervisor: log in as root, or set ansible_pct_sudo"),
    )  # fmt: skip

    def enter(self) -> list[str]:
        return ["lxc-attach", "-n", self.vmid, "--clear-env", "--"]


MODES: dict[str, Callable[..., Entry]] = {"pct": PctExec, "lxc-attach": LxcAttach, "local": PctExec}
