# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Results for people: a table of the tools, a table of the way from signal to verdict."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .methods import KILLALL, OURS, SHELL, TITLES
from .states import STATES

#: Allowed from the moment at which the memory is back until the verdict: two looks, and this (seconds).
SLACK = 0.050


def line(trial: Mapping[str, Any]) -> str:
    """One trial, while it goes."""
    head = "%-13s %-8s" % (trial["state"], trial["method"])
    if "failed" in trial:
        return "%s was not possible: %s" % (head, trial["failed"])
    return "%s %6.2f s  %-8s (%s)  %s" % (head, trial["wall"], trial["verdict"], _right(trial), _harm(trial))


def _right(trial: Mapping[str, Any]) -> str:
    return {True: "right", False: "WRONG", None: "none"}[trial["right"]]


def _harm(trial: Mapping[str, Any]) -> str:
    parts = []
    if trial["wrongly_killed"]:
        parts.append("wrongly killed: %s" % ", ".join(trial["wrongly_killed"]))
    if trial["left_over"]:
        parts.append("left over: %s" % ", ".join(trial["left_over"]))
    return "; ".join(parts) or "nothing wrongly killed, nothing left over"


def _of(results: Mapping[str, Any], state: str, method: str) -> list[Mapping[str, Any]]:
    return [
        trial
        for trial in results["trials"]
        if trial["state"] == state and trial["method"] == method and "failed" not in trial
    ]


def _cell(trials: Sequence[Mapping[str, Any]]) -> list[str]:
    """Wall time, wrongly killed, left over, verdict."""
    walls = [trial["wall"] for trial in trials]
    time = "%.2f" % statistics.median(walls)
    if len(walls) > 1:
        time += " (%.2f-%.2f)" % (min(walls), max(walls))
    wrong = sorted({label for trial in trials for label in trial["wrongly_killed"]})
    left = sorted({label for trial in trials for label in trial["left_over"]})
    verdicts = sorted({"%s: %s%s" % (trial["verdict"], _right(trial), _screen(trial)) for trial in trials})
    return [time, ", ".join(wrong) or "–", ", ".join(left) or "–", "; ".join(verdicts)]


def _screen(trial: Mapping[str, Any]) -> str:
    """The number as it stands on the screen, where fuser's PIDs stand before it in the same word."""
    shown = trial.get("on_screen", "")
    return "; it reads %s" % shown if shown and not trial["said"].startswith(shown + " ") else ""


def _row(cells: Sequence[str]) -> str:
    return "| %s |" % " | ".join(cells)


def comparison(results: Mapping[str, Any]) -> list[str]:
    out = [_row(["starting state", "tool", "s", "wrongly killed", "left over", "verdict"]), _row(["---"] * 6)]
    for state in STATES:
        for method in (OURS, SHELL, KILLALL):
            trials = _of(results, state.name, method)
            if trials:
                out.append(_row([state.text if method == OURS else "", TITLES[method], *_cell(trials)]))
    return out


def way(death: Mapping[str, Any]) -> dict[str, float | bool]:
    """Seconds between the moments of one death."""
    ended = death["ended"] - death["signalled"]
    back = max(death["back"] or death["finished"], death["signalled"])
    durations = [end - begin for begin, end, _verdict in death["looks"][1:]]
    look = statistics.median(durations) if durations else 0.0
    late = death["finished"] - max(back, death["ended"])
    return {
        "ended": ended,
        "back": back - death["signalled"],
        "verdict": death["finished"] - death["signalled"],
        "late": late,
        "look": look,
        "allowed": 2 * look + SLACK,
        "kept": late <= 2 * look + SLACK,
    }


def deaths(results: Mapping[str, Any]) -> list[str]:
    names = ["GiB held", "process ended", "memory back", "verdict", "verdict after the memory", "one look", "allowed"]
    out = [_row(names), _row(["---:"] * len(names))]
    for death in sorted(results["deaths"], key=lambda death: death["mib"]):
        took = way(death)
        numbers = [took[name] * 1000 for name in ("ended", "back", "verdict", "late", "look", "allowed")]
        out.append(_row(["%d" % (death["mib"] // 1024), *("%.0f ms" % number for number in numbers)]))
    return out


def document(results: Mapping[str, Any]) -> str:
    gpus = results["gpus"]
    mark = " (simulated)" if results["simulated"] else ""
    head = "%s%s: %d × %s, driver %s, Linux %s, %d processors, Python %s, %.0f s in all." % (
        results["date"],
        mark,
        len(gpus),
        gpus[0] if gpus else "no GPU",
        results["driver"],
        results["kernel"],
        results["processors"],
        results["python"],
        results["seconds"],
    )
    lines = [head, "" if results["fuser"] else "\nThere was no fuser: the shell line went without it.\n"]
    lines += comparison(results)
    if results["deaths"]:
        lines += ["", "From the signal to the verdict of a check that already waits:", "", *deaths(results)]
    return "\n".join(lines) + "\n"


def failures(results: Mapping[str, Any]) -> list[str]:
    """What the modules did not do as promised."""
    out = []
    expected = {state.name: "free" if state.can_be_free else "not free" for state in STATES}
    for trial in results["trials"]:
        if "failed" in trial:
            out.append(line(trial))
        elif trial["method"] == OURS and (
            trial["wrongly_killed"]
            or trial["left_over"]
            or not trial["right"]
            or trial["verdict"] != expected[trial["state"]]
        ):
            out.append("%s: %s" % (line(trial), trial["said"]))
    for death in results["deaths"]:
        if death["verdict"] != "free" or death["back"] is None:
            out.append("the GPU of a dead process was not proven free: %s" % death["msg"])
        elif not way(death)["kept"] and not results["simulated"]:
            out.append("a verdict was %(late).3f s later than the memory, %(allowed).3f s are allowed" % way(death))
    return out
