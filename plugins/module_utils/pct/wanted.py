# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""What module pct_exec is asked to do: its options, read strictly, all that is wrong with them told at once."""

from __future__ import annotations

import dataclasses
import typing as t

from ..common.errors import CleanslateError
from ..common.text import show

STATES = ("running", "stopped", "restarted", "unchanged")
_COMMAND_KEYS = ("argv", "creates", "removes", "changed_when", "ok_codes", "chdir", "stdin", "timeout")
_CONTAINER_KEYS = ("vmid", "state", "commands")
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclasses.dataclass(frozen=True)
class Command:
    argv: tuple[str, ...]
    creates: str = ""
    removes: str = ""
    #: A truth value, or an expression that the control node judges by the result.
    changed_when: bool | str = True
    #: Exit codes that are no failure.
    ok_codes: tuple[int, ...] = (0,)
    chdir: str = ""
    stdin: str = ""
    #: Seconds.
    timeout: float = 600.0


@dataclasses.dataclass(frozen=True)
class Wanted:
    vmid: int
    state: str
    commands: tuple[Command, ...]


class _Problems:
    def __init__(self) -> None:
        self.found: list[str] = []

    def add(self, where: str, what: str) -> None:
        self.found.append("%s: %s" % (where, what))


def read_wanted(params: t.Mapping[str, t.Any]) -> list[Wanted]:
    """The containers with what each is to become. Raises CleanslateError that names every wrong entry."""
    problems = _Problems()
    shared = _commands(params["commands"], "commands", params["timeout"], problems)
    out = []
    for index, entry in enumerate(params["containers"]):
        wanted = _container(entry, "containers[%d]" % index, params, shared, problems)
        if wanted is not None:
            out.append(wanted)
    if problems.found:
        raise CleanslateError("\n".join(problems.found), problems=problems.found)
    return out


def _container(
    entry: t.Any, where: str, params: t.Mapping[str, t.Any], shared: tuple[Command, ...], problems: _Problems
) -> Wanted | None:
    if not isinstance(entry, t.Mapping):
        entry = {"vmid": entry}
    _unknown(entry, _CONTAINER_KEYS, where, problems)
    vmid = _vmid(entry.get("vmid"))
    if vmid is None:
        problems.add(where, "vmid: %s is no container id" % _text(entry.get("vmid")))
    state = str(entry.get("state") or params["state"])
    if state not in STATES:
        problems.add(where, "state: %s is none of %s" % (_text(state), ", ".join(STATES)))
    own = entry.get("commands")
    commands = shared if own is None else _commands(own, where + ".commands", params["timeout"], problems)
    if state == "stopped" and commands:
        if own is not None:
            problems.add(where, "a stopped container runs no commands; name it twice, first with the commands")
        commands = ()
    return None if vmid is None else Wanted(vmid, state, commands)


def _commands(value: t.Any, where: str, timeout: float, problems: _Problems) -> tuple[Command, ...]:
    if not isinstance(value, (list, tuple)):
        problems.add(where, "is no list")
        return ()
    read = [_command(entry, "%s[%d]" % (where, index), timeout, problems) for index, entry in enumerate(value)]
    return tuple(command for command in read if command is not None)


def _command(entry: t.Any, where: str, timeout: float, problems: _Problems) -> Command | None:
    before = len(problems.found)
    if not isinstance(entry, t.Mapping):
        entry = {"argv": entry}
    _unknown(entry, _COMMAND_KEYS, where, problems)
    argv = entry.get("argv")
    if not isinstance(argv, (list, tuple)) or not argv or not all(isinstance(w, (str, int, float)) for w in argv):
        problems.add(
            where, "argv: write a list of words, [systemctl, restart, nginx]; for a shell's line [sh, -c, '...']"
        )
        argv = ()
    words = tuple(_word(word) for word in argv)
    if words and not words[0]:
        problems.add(where, "argv: the first word is empty")
    texts = {key: entry.get(key) for key in ("creates", "removes", "chdir", "stdin")}
    for key, value in texts.items():
        if value is not None and not isinstance(value, str):
            problems.add(where, "%s: %s is no text" % (key, _text(value)))
    if any("\0" in text for text in (*words, *(str(texts[key] or "") for key in ("creates", "removes", "chdir")))):
        problems.add(where, "no word may hold a NUL character")
    codes = entry.get("ok_codes", [0])
    codes = codes if isinstance(codes, (list, tuple)) else [codes]
    ok_codes = tuple(int(code) for code in codes if str(code).isdigit())
    if len(ok_codes) != len(codes):
        problems.add(where, "ok_codes: write a list of exit codes, [0, 3]")
    seconds = entry.get("timeout", timeout)
    try:
        seconds = float(seconds)
    except (TypeError, ValueError):
        seconds = 0.0
    if seconds <= 0:
        problems.add(where, "timeout: %s is no number of seconds above 0" % _text(entry.get("timeout", timeout)))
    if len(problems.found) > before:
        return None
    return Command(
        words,
        texts["creates"] or "",
        texts["removes"] or "",
        _changed_when(entry.get("changed_when", True)),
        ok_codes,
        texts["chdir"] or "",
        texts["stdin"] or "",
        seconds,
    )


def _unknown(entry: t.Mapping[str, t.Any], known: t.Sequence[str], where: str, problems: _Problems) -> None:
    for key in entry:
        if key not in known:
            problems.add(where, "%s: there is no such key, only %s" % (_text(key), ", ".join(known)))


def _vmid(value: t.Any) -> int | None:
    text = str(value)
    if isinstance(value, bool) or not (text.isascii() and text.isdigit()) or text.startswith("0") or len(text) > 9:
        return None
    return int(text) if int(text) >= 100 else None


def _word(word: t.Any) -> str:
    # As YAML wrote it: a bare true is the word true.
    return str(word).lower() if isinstance(word, bool) else str(word)


def is_truth_value(value: t.Any) -> bool:
    """Whether C(changed_when) is a truth value, not an expression."""
    return str(value).strip().lower() in (*_TRUE, *_FALSE)


def _changed_when(value: t.Any) -> bool | str:
    return str(value).strip().lower() in _TRUE if is_truth_value(value) else str(value)


def _text(value: t.Any) -> str:
    return show(repr(value))[:60]
