# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Which program a process is: by the module or script that an interpreter runs, by its executable, by its title.

Whole names only. C(vim sglang.launch_server.log), a shell whose command line holds the pattern, and this very module
are none of them.
"""

from __future__ import annotations

import os
import re
import typing as t

from ..common.errors import CleanslateError
from ..common.text import show
from ..proc.table import Process

#: TASK_COMM_LEN without the final NUL (include/linux/sched.h).
COMM_LENGTH = 15

#: What SGLang starts: both launchers, and the titles that it gives its processes with setproctitle
#: (sglang 0.5.23: srt/managers/scheduler.py, detokenizer_manager.py, data_parallel_controller.py,
#: multi_tokenizer_mixin.py).
#: The plain title sglang.launch_server is the launcher under a name set by prctl or exec -a.
DEFAULT_MATCH: list[t.Any] = [
    {"module": "sglang.launch_server"},
    {"script": "sglang", "args": ["serve"]},
    {"title": "sglang.launch_server"},
    {"title": "sglang::scheduler"},
    {"title": "sglang::detokenizer"},
    {"title": "sglang::data_parallel_controller"},
    {"title": "sglang::detokenizer_router"},
    {"title": "sglang::tokenizer_worker:<pid>"},
    {"title": "sglang::router"},
    {"title": "sglang::server"},
]

_PYTHON = re.compile(r"(?:python|pypy)\d*(?:\.\d+)*[a-z]?")
_INTERPRETER = re.compile(
    r"(?:python|pypy|perl|ruby|lua|luajit|php|tclsh|wish)\d*(?:[.-]\d+)*[a-z]?"
    r"|(?:ba|da|z|k|mk|c|tc|fi|r|a)?sh|node|nodejs|deno|bun|java|mono|dotnet|env|busybox|toybox|julia|R|Rscript"
    r"|ld-linux[\w.-]*|ld[\w.-]*\.so[\w.]*|awk|gawk|mawk|expect"
)
# Programs that carry everybody's processes or sessions: never what somebody means to end for a GPU's sake.
_SYSTEM = re.compile(
    r"init|systemd(?:-\w+)*|\(sd-pam\)|sshd(?:-session)?|sudo|su|login|kthreadd|tmux|screen|cron|crond"
)
_CHAIN = r"(?:_(?:TP|DP|PP|EP)\d+)*"
# The same, cut anywhere.
_CUT_CHAIN = _CHAIN + r"(?:_(?:(?:T|D|P|E)P?)?)?"
_MODULE = re.compile(r"[A-Za-z_][\w-]*(?:\.[A-Za-z_][\w-]*)*")
_KINDS = ("module", "script", "exe", "title")


def is_interpreter(path: str) -> bool:
    """Whether a program of this name runs other people's programs."""
    return _INTERPRETER.fullmatch(os.path.basename(path)) is not None


def _exe(process: Process) -> str | None:
    exe = process.exe
    suffix = " (deleted)"
    return exe[: -len(suffix)] if exe is not None and exe.endswith(suffix) else exe


class PythonCall(t.NamedTuple):
    """What a Python interpreter was told to run: exactly one of C(module), C(script), or neither (-c, stdin)."""

    module: str | None
    script: str | None
    args: list[str]


def python_call(process: Process) -> PythonCall | None:
    """What the process runs, if it is a Python interpreter; None if it is anything else.

    Options as python(1) reads them: C(-m) may be glued to its value or to other letters, C(-W) and C(-X) take a value.
    """
    argv = process.argv
    if not argv:
        return None
    # The kernel knows the program; only where that cannot be read does the process's own word count.
    program = os.path.basename(_exe(process) or argv[0])
    if _PYTHON.fullmatch(program) is None:
        return None
    at = 1
    while at < len(argv):
        word = argv[at]
        if word == "--check-hash-based-pycs":
            at += 2
            continue
        if word == "--":
            at += 1
            break
        if not word.startswith("-") or word == "-":
            break
        if word.startswith("--"):
            at += 1
            continue
        for place, letter in enumerate(word[1:], 2):
            rest = word[place:]
            if letter == "c":
                return PythonCall(None, None, argv[at + (1 if rest else 2) :])
            if letter == "m":
                name = rest or (argv[at + 1] if at + 1 < len(argv) else "")
                return PythonCall(name, None, argv[at + (1 if rest else 2) :])
            if letter in "WX":
                if not rest:
                    at += 1
                break
        at += 1
    if at >= len(argv) or argv[at] == "-":
        return PythonCall(None, None, argv[at + 1 :])
    return PythonCall(None, argv[at], argv[at + 1 :])


class Pattern:
    """One entry of C(match)."""

    def __init__(self, kind: str, value: str, args: t.Sequence[str] = ()) -> None:
        self.kind = kind
        self.value = value
        self.args = list(args)
        if kind == "title":
            name = re.escape(value).replace(re.escape("<pid>"), r"\d+")
            self._full = re.compile(name + _CHAIN)
            self._cut = re.compile(name + _CUT_CHAIN)
            # How every match begins, cut or not: most processes are told apart by that alone.
            self._head = value.split("<pid>")[0][:8]

    def __str__(self) -> str:
        text = "%s: %s" % (self.kind, show(self.value))
        return "{%s, args: %s}" % (text, show(" ".join(self.args))) if self.args else "{%s}" % text

    def __repr__(self) -> str:
        return "Pattern(%s)" % self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pattern) and (self.kind, self.value, self.args) == (
            other.kind,
            other.value,
            other.args,
        )

    def __hash__(self) -> int:
        return hash((self.kind, self.value, tuple(self.args)))

    def matches(self, process: Process, call: PythonCall | None = None) -> bool:
        """Whether the process is this program. Never a kernel thread. C(call): its python_call(), where known."""
        if process.kernel_thread:
            return False
        if self.kind == "title":
            return self._matches_title(process)
        if self.kind == "exe":
            exe = _exe(process)
            return exe is not None and exe in (self.value, os.path.realpath(self.value))
        call = call or python_call(process)
        if call is None or call.args[: len(self.args)] != self.args:
            return False
        if self.kind == "module":
            return call.module == self.value
        if call.script is None:
            return False
        return call.script == self.value if "/" in self.value else os.path.basename(call.script) == self.value

    def _matches_title(self, process: Process) -> bool:
        argv = process.argv
        if not process.comm.startswith(self._head) and not (argv and argv[0].lstrip().startswith(self._head)):
            return False
        if argv and self._full.fullmatch(argv[0].strip()):
            return True
        comm = process.comm
        size = len(comm.encode("utf-8", "surrogateescape"))
        if size < COMM_LENGTH:
            return self._full.fullmatch(comm) is not None
        # Cut to 15 bytes, so only the beginning is known, unless a word of the command line is the whole name:
        # the kernel names a process after its program's file.
        for word in [_exe(process) or "", *argv[:2]]:
            whole = os.path.basename(word)
            if whole and _cut(whole) == comm:
                return self._full.fullmatch(whole) is not None
        literal = self.value.split("<pid>")[0]
        if len(literal.encode("utf-8", "surrogateescape")) >= COMM_LENGTH:
            return _cut(literal) == comm
        return self._cut.fullmatch(comm) is not None


def _cut(text: str) -> str:
    return text.encode("utf-8", "surrogateescape")[:COMM_LENGTH].decode("utf-8", "surrogateescape")


def _reject(entry: object, why: str, mend: str) -> CleanslateError:
    return CleanslateError("match: %s %s. %s" % (show(str(entry)), why, mend), option="match")


def _parse_one(entry: t.Any) -> Pattern:
    example = "Write for example {module: sglang.launch_server}, {script: sglang, args: [serve]}, {exe: /opt/x/server} "
    example += "or a title such as 'sglang::scheduler'"
    if isinstance(entry, str):
        entry = {"title": entry}
    if not isinstance(entry, t.Mapping):
        raise _reject(entry, "is no pattern", example + ".")
    given = [kind for kind in _KINDS if entry.get(kind) is not None]
    unknown = sorted(str(key) for key in entry if key not in (*_KINDS, "args"))
    if unknown:
        raise _reject(entry, "has the unknown key %s" % show(", ".join(unknown)), example + ".")
    if len(given) != 1:
        raise _reject(entry, "must have exactly one of %s" % ", ".join(_KINDS), example + ".")
    kind = given[0]
    value, args = entry[kind], entry.get("args")
    if not isinstance(value, str) or (args is not None and not isinstance(args, (list, tuple))):
        raise _reject(entry, "is no pattern: names are text, args is a list", example + ".")
    args = [str(word) for word in args or ()]
    if args and kind in ("exe", "title"):
        raise _reject(entry, "has args, which only module and script can have", "Take args away.")
    value = value.strip()
    # Wildcards are looked for first: who writes '*' expects that it matches everything.
    if re.search(r"[*?\[\]]|^\W*$|\.[+]", value) is not None:
        raise _reject(
            entry,
            "would match everything, or nothing",
            "Names are compared whole; there are no wildcards. " + example + ".",
        )
    if value.isdigit():
        raise _reject(
            entry,
            "is a number: process ids are reused, and process 1 is never ended",
            "Name the program instead. " + example + ".",
        )
    if kind == "module" and _MODULE.fullmatch(value) is None:
        raise _reject(entry, "is no name of a Python module", example + ".")
    if kind == "exe" and not os.path.isabs(value):
        raise _reject(entry, "is no absolute path", "Write the program's full path.")
    names = {value, os.path.basename(value)}
    if kind == "exe":
        names.add(os.path.basename(os.path.realpath(value)))
    if kind in ("exe", "title") and any(is_interpreter(name) for name in names):
        raise _reject(
            entry,
            "is an interpreter and would match everything that it runs",
            "Name what it runs: {module: …} or {script: …}.",
        )
    if kind in ("exe", "title") and any(_SYSTEM.fullmatch(name) for name in names):
        raise _reject(entry, "is part of the system and carries other people's processes", "Name the server itself.")
    return Pattern(kind, value, args)


def parse_match(entries: t.Iterable[t.Any]) -> list[Pattern]:
    """Patterns out of the option C(match). Raises CleanslateError naming the entry, what is wrong and the mend."""
    return [_parse_one(entry) for entry in entries]


def first_match(patterns: t.Iterable[Pattern], process: Process) -> Pattern | None:
    """The first pattern that the process matches."""
    call = python_call(process)
    for pattern in patterns:
        # What is no Python call is none for every pattern.
        if (call is not None or pattern.kind in ("exe", "title")) and pattern.matches(process, call):
            return pattern
    return None
