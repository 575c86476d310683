# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""The four server modules, from their parameters to their results: leases, surveys, records."""

from __future__ import annotations

import contextlib
import typing as t

from ..common.errors import CleanslateError
from ..gpu.free import identities
from ..gpu.survey import SurveyOptions, take_survey
from ..proc.identity import require_kernel
from ..state.lease import Lease
from ..state.record import RecordStore
from . import proof, ready
from .declaration import Declaration
from .launch import last_ready, launch, readable, salt_of, shown_nccl
from .plan import RESET, Planner, Result
from .prepare import prepare
from .runtime import Runtime, load


def _survey(params: t.Mapping[str, t.Any]) -> t.Any:
    """All GPUs of the node: which of them are the server's is the declaration's matter."""
    return take_survey(SurveyOptions.from_params(dict(params, devices=[])))


def plan_server(declaration: Declaration, params: t.Mapping[str, t.Any], check_mode: bool) -> dict[str, t.Any]:
    """Module server_plan. Takes the run's lease first, so that what was planned is still true when it is done. Where
    it fails it drops the lease again, and where there is nothing to do if it was told to: the run may have more to do
    on this node."""
    require_kernel()
    lease = Lease(params["run_dir"], params["lease"])
    if params["lease"] and not check_mode:
        with lease.held(params["lock_timeout"]):
            pass
    else:
        lease.check()
    result: Result | None = None
    try:
        result = Planner(
            declaration,
            _survey(params),
            params["teardown"],
            params["state_dir"],
            always=params["reset"] == "always",
            check_mode=check_mode,
            assume_ended=identities(params["assume_ended"], "assume_ended"),
        ).run()
    finally:
        done = result is None or not (result.verdict == RESET or (result.converged and not params["release_lease"]))
        if not check_mode and params["lease"] and done:
            with contextlib.suppress(CleanslateError):
                lease.release()
    out = result.as_dict()
    out.update(changed=False, instance=declaration.name)
    if result.changes:
        before = {str(c["key"]): str(c["before"]) for c in result.changes if c["before"] is not None}
        after = {str(c["key"]): str(c["after"]) for c in result.changes if c["after"] is not None}
        out["diff"] = {
            "before_header": "%s as launched" % declaration.name,
            "after_header": "%s as declared" % declaration.name,
            "before": readable(before),
            "after": readable(after),
        }
    return out


def launch_server(declaration: Declaration, params: t.Mapping[str, t.Any], check_mode: bool) -> dict[str, t.Any]:
    """Module server_launch."""
    require_kernel()
    lease = Lease(params["run_dir"], params["lease"])
    if params["rollback"]:
        earlier = last_ready(params["state_dir"], declaration)
        if earlier is None:
            said = "No declaration of %s has ever become ready, so there is none to go back to." % declaration.name
            return {"changed": False, "instance": declaration.name, "rolled_back": False, "msg": said}
        declaration = earlier
    with contextlib.ExitStack() as stack:
        if check_mode:
            lease.check()
        else:
            stack.enter_context(lease.held(params["lock_timeout"]))
        survey = _survey(params)
        prepared = prepare(declaration, params["state_dir"], survey, check_mode)
        done = launch(prepared, survey, params["state_dir"], check_mode)
    command = prepared.require().command
    record = done.record
    log = "journalctl --unit %s" % record.unit if record.unit else prepared.where.log
    if not done.changed:
        said = "%s runs already (pid %d)." % (declaration.name, record.pid)
    elif check_mode:
        said = "%s would be started." % declaration.name
    else:
        said = "%s was started (pid %d); its output: %s" % (declaration.name, record.pid, log)
    return {
        "changed": done.changed,
        "instance": declaration.name,
        "pid": record.pid,
        "start_time": record.start_time,
        "backend": record.backend,
        "unit": record.unit,
        "log": log,
        "argv": command.shown_argv(),
        "environment": command.shown_environment(),
        "nccl": shown_nccl(prepared),
        "written": done.written,
        "simulated": record.simulated,
        "rolled_back": bool(params["rollback"]),
        "diff": done.diff,
        "msg": said,
    }


def wait_for_server(params: t.Mapping[str, t.Any], check_mode: bool) -> dict[str, t.Any]:
    """Module server_ready: one window."""
    name, state_dir = params["instance"], params["state_dir"]
    nothing = {
        "changed": False,
        "instance": name,
        "ready": False,
        "events": [],
        "cursor": {},
        "elapsed": 0.0,
        "phase": "",
    }
    if check_mode and RecordStore(state_dir).load(name) is None:
        return dict(
            nothing, state="not_launched", msg="%s is not launched yet, so there is nothing to wait for." % name
        )
    require_kernel()
    record = load(name, state_dir)
    runtime = Runtime(record, state_dir)
    if record.ready_at:
        # One that was ready once and came back by itself; during a first start a restart is a failure.
        runtime.follow_restart()
    if check_mode and not runtime.main_alive():
        return dict(nothing, state="not_launched", msg="%s does not run yet, so there is nothing to wait for." % name)
    if params["lease"] and not check_mode:
        # A model may take longer to load than a lease lives.
        with Lease(params["run_dir"], params["lease"]).held(params["lock_timeout"]):
            pass
    window = 1.0 if check_mode else params["window"]
    out = ready.wait(runtime, window, params["cursor"])
    limit = float(params["timeout"] or runtime.details.get("ready_timeout", 900.0))
    out.update(changed=False, instance=name, timeout=limit, simulated=record.simulated)
    if out["state"] == "ready" and not check_mode:
        ready.remember(runtime, state_dir)
    if out["state"] == "ready":
        out["msg"] = "%s is ready after %.1f s." % (name, out["elapsed"])
    elif out["state"] == "failed":
        lines = "".join("\n  | " + line for line in out["diagnosis"]["lines"])
        out["msg"] = "%s failed after %.1f s: %s%s" % (name, out["elapsed"], out["diagnosis"]["msg"], lines)
    else:
        out["msg"] = "%s is not ready yet (%s)." % (name, out["phase"])
    return out


def prove_server(params: t.Mapping[str, t.Any], check_mode: bool) -> dict[str, t.Any]:
    """Module server_proof."""
    name, state_dir = params["instance"], params["state_dir"]
    lease = Lease(params["run_dir"], params["lease"])
    try:
        return _prove(name, state_dir, params["timeout"], check_mode)
    finally:
        if params["release_lease"] and params["lease"] and not check_mode:
            lease.release()


def _prove(name: str, state_dir: str, timeout: float, check_mode: bool) -> dict[str, t.Any]:
    nothing: dict[str, t.Any] = {
        "changed": False,
        "instance": name,
        "proven": False,
        "processes": [],
        "arguments": [],
        "problems": [],
        "notes": [],
        "workers": 0,
        "simulated": False,
    }
    if check_mode and RecordStore(state_dir).load(name) is None:
        return dict(nothing, msg="%s is not launched yet, so there is nothing to prove." % name)
    record = load(name, state_dir)
    runtime = Runtime(record, state_dir)
    runtime.follow_restart()
    own = runtime.members()
    if check_mode and not (own and record.ready_at):
        return dict(nothing, msg="%s does not run yet, so there is nothing to prove." % name)
    declared = record.details.get("declared")
    declared = declared if isinstance(declared, dict) else {}
    rows = proof.prove_members(own, record.pid, runtime.supervisor, declared, salt_of(record))
    wanted = record.details.get("arguments")
    wanted = wanted if isinstance(wanted, dict) else {}
    reply = runtime.client().first(["/server_info", "/get_server_info"], timeout)
    account, note = proof.hear(reply, record.details.get("account"))
    arguments = proof.compare_arguments(wanted, account or {})
    problems = proof.verdict(rows, arguments, runtime.schedulers, account)
    if account and not note and not problems and not check_mode:
        _remember_account({field: account[field] for field in wanted if field in account}, name, state_dir)
    workers = [row for row in rows if row["role"] == "scheduler"]
    checked = sum(row["checked"] for row in rows)
    if problems:
        said = "%s does not run as declared:\n%s" % (name, "\n".join("- " + problem for problem in problems))
    else:
        said = "%s runs as declared: %d processes (%d workers), %d variables and %d arguments compared." % (
            name,
            len(rows),
            len(workers),
            checked,
            len(arguments),
        )
    return dict(
        nothing,
        proven=not problems,
        failed=bool(problems),
        processes=rows,
        arguments=arguments,
        problems=problems,
        notes=[note] if note else [],
        workers=len(workers),
        simulated=record.simulated,
        msg=said,
    )


def _remember_account(account: dict[str, t.Any], name: str, state_dir: str) -> None:
    """For a proof that finds the server too busy to tell. Into the record as it is on disk, not as it was followed."""
    record = load(name, state_dir)
    if record.details.get("account") != account:
        record.details["account"] = account
        RecordStore(state_dir).save(record)
