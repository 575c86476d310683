# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""What a playbook run did to each node, told from the registered results of its steps."""

from __future__ import annotations

import typing as t

#: The steps in the order in which a run takes them, and the variable in which the roles keep each one's result.
STEPS = (
    ("look", "__gpu_node_info"),
    ("plan", "__sglang_server_plan"),
    ("teardown", "__gpu_teardown_result"),
    ("prove free", "__gpu_teardown_free"),
    ("sweep", "__gpu_teardown_residue"),
    ("launch", "__sglang_server_launch"),
    ("ready", "__sglang_server_ready"),
    ("prove server", "__sglang_server_proof"),
)
#: The actions behind those steps that keep a failed result whole for the report.
ACTIONS = {
    "plan": "server_plan",
    "teardown": "gpu_teardown",
    "prove free": "gpu_free",
    "launch": "server_launch",
    "prove server": "server_proof",
}
#: Set by the playbooks' rescue: a step that failed without a result of its own (a template, an assertion).
FAILURE = "__cleanslate_failure"
GOOD = frozenset(["free", "serving", "converged", "would free", "would launch", "partly done"])
BAD = frozenset(["blocked", "failed", "unreachable"])
#: Characters of a reason in the table; the file has all of it.
REASON_WIDTH = 300
REPORT_HEADERS = ("node", "instance", "outcome", "GPUs free", "ended", "seconds", "reason")


#: Where the role keeps what it did for each of several servers: C({name: {key: result}}), and the step behind a key.
INSTANCES = "__sglang_server_results"
INSTANCE_STEPS = {
    "plan": "plan",
    "teardown": "teardown",
    "free": "prove free",
    "residue": "sweep",
    "launch": "launch",
    "ready": "ready",
    "proof": "prove server",
}


def node_rows(
    host: str, variables: t.Mapping[str, t.Any], check: bool = False, partly: bool = False
) -> list[dict[str, t.Any]]:
    """The rows of one node: one for each declared server that was planned, else one for the node.

    C(outcome) is one of GOOD, or C(blocked), C(failed), C(unreachable), C(not run). C(partly): only some steps were
    asked for (C(--tags)), so that a run that ends after them is as asked for.
    """
    failure = variables.get(FAILURE)
    kept = variables.get(INSTANCES)
    if not isinstance(kept, t.Mapping) or not kept:
        return [_row(host, _done({step: variables.get(variable) for step, variable in STEPS}), failure, check, partly)]
    look = {"look": variables.get("__gpu_node_info")}
    servers = {
        name: _done({**look, **{INSTANCE_STEPS[key]: result for key, result in steps.items() if key in INSTANCE_STEPS}})
        for name, steps in kept.items()
    }
    rows = [_row(host, done, None, check, partly, name) for name, done in servers.items()]
    if isinstance(failure, t.Mapping) and not any(row["outcome"] in BAD for row in rows):
        # It has no result of its own: it belongs to the first server that was not finished, or came after the last.
        at = next((at for at, row in enumerate(rows) if row["outcome"] in ("not run", "partly done")), len(rows) - 1)
        name = list(servers)[at]
        rows[at] = _row(host, servers[name], failure, check, partly, name)
    return rows


def _done(results: t.Mapping[str, t.Any]) -> dict[str, t.Mapping[str, t.Any]]:
    """The steps that were taken, in their order."""
    return {
        step: results[step]
        for step, _variable in STEPS
        if isinstance(results.get(step), t.Mapping) and results[step] and not results[step].get("skipped")
    }


def _row(
    host: str,
    done: dict[str, t.Mapping[str, t.Any]],
    failure: t.Any,
    check: bool,
    partly: bool,
    instance: str | None = None,
) -> dict[str, t.Any]:
    row: dict[str, t.Any] = {
        "host": host,
        "instance": instance or _first(done, "instance"),
        "outcome": "not run",
        "step": None,
        "reason": "",
        "gpus": _gpus(done),
        "ended": [dict(p) for p in done.get("teardown", {}).get("killed", [])],
        "stopped_units": list(done.get("teardown", {}).get("stopped_units", [])),
        "seconds": round(sum(float(r.get("elapsed") or r.get("waited") or 0) for r in done.values()), 1),
        "changed": any(bool(r.get("changed")) for r in done.values()),
        "simulated": any(bool(r.get("simulated")) for r in done.values()),
        "warnings": [w for r in done.values() for w in r.get("warnings", [])],
    }
    row["outcome"], row["step"], row["reason"] = _outcome(done, failure, check)
    if partly and done and row["outcome"] == "not run":
        row["outcome"], row["reason"] = "partly done", "only some steps were asked for: up to '%s'" % row["step"]
    row["ok"] = row["outcome"] in GOOD
    return row


def _first(done: t.Mapping[str, t.Mapping[str, t.Any]], key: str) -> t.Any:
    return next((r[key] for r in done.values() if isinstance(r.get(key), str)), None)


def _gpus(done: t.Mapping[str, t.Mapping[str, t.Any]]) -> dict[str, int] | None:
    for step in ("prove free", "look"):
        gpus = done.get(step, {}).get("gpus")
        if gpus:
            counts = {"free": 0, "busy": 0, "unknown": 0}
            for gpu in gpus:
                verdict = gpu.get("verdict", "unknown")
                counts[verdict if verdict in counts else "unknown"] += 1
            return dict(counts, total=len(gpus))
    return None


def _outcome(done: t.Mapping[str, t.Mapping[str, t.Any]], failure: t.Any, check: bool) -> tuple[str, str | None, str]:
    for step, result in done.items():
        if result.get("unreachable"):
            return "unreachable", step, str(result.get("msg") or "no answer")
    for step, result in done.items():
        if result.get("failed"):
            blocked = step == "plan" and result.get("verdict") == "blocked"
            if blocked and result.get("blocked"):
                return "blocked", step, "; ".join(_reason(finding) for finding in result["blocked"])
            return "blocked" if blocked else "failed", step, str(result.get("msg") or "no reason given")
    if isinstance(failure, t.Mapping):
        if failure.get("unreachable"):
            return "unreachable", failure.get("task"), str(failure.get("msg") or "no answer")
        return "failed", failure.get("task"), str(failure.get("msg") or "no reason given")
    if not done:
        return "not run", None, "no step of the play ran on this node"
    last = list(done)[-1]
    plan = done.get("plan")
    if plan is not None:
        reasons = "; ".join(_reason(r) for r in plan.get("reasons", []))
        if plan.get("converged"):
            return "converged", last, "as declared, nothing to do"
        if check:
            return "would launch", last, reasons
        if "prove server" in done:
            return "serving", last, reasons
        return "not run", last, "the play ended after step '%s'" % last
    free = done.get("prove free")
    if free is not None:
        verdict = free.get("predicted_verdict") if check else free.get("verdict")
        if verdict == "free":
            return ("would free" if check else "free"), last, str(free.get("msg") or "")
        return "failed", last, str(free.get("msg") or "not proven free")
    return "not run", last, "the play ended after step '%s'" % last


def _reason(reason: t.Any) -> str:
    return str(reason.get("msg") or reason.get("code")) if isinstance(reason, t.Mapping) else str(reason)


def cells(row: t.Mapping[str, t.Any]) -> list[str]:
    """The row as the table shows it."""
    gpus = row["gpus"]
    ended = len(row["ended"]) + len(row["stopped_units"])
    reason = row["reason"].split("\n", 1)[0]
    if len(reason) > REASON_WIDTH:
        reason = reason[: REASON_WIDTH - 1] + "…"
    if row["simulated"]:
        reason = "[simulated] " + reason
    return [
        row["host"],
        row["instance"] or "",
        row["outcome"] if row["ok"] else row["outcome"].upper(),
        "%d of %d" % (gpus["free"], gpus["total"]) if gpus else "",
        str(ended) if ended else "",
        "%.1f" % row["seconds"] if row["seconds"] else "",
        reason,
    ]
