# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""One teardown from options to result: look, plan, end."""

from __future__ import annotations

import typing as t

from ..common.clock import Clock
from ..common.errors import CleanslateError
from ..gpu.survey import Survey, SurveyOptions, Surveyor
from ..proc.identity import Kernel, require_kernel
from ..state.lease import Lease
from .end import Limits, Outcome, end
from .plan import Memory, Plan, PlanOptions, gather, make_plan
from .reader import Reader
from .units import Systemd


class Seams(t.NamedTuple):
    """What tests replace."""

    surveyor: t.Callable[[SurveyOptions], Surveyor] = Surveyor
    kernel: t.Callable[[Surveyor], Kernel] = lambda surveyor: Kernel(surveyor.fs)
    systemd: Systemd | None = None
    clock: Clock | None = None
    reader: Reader | None = None


def _summary(killed: int, units: int, spared: int, check: bool) -> str:
    if not killed and not units:
        return "Nothing to end; %d spared." % spared
    parts = []
    if killed:
        parts.append("%d process%s" % (killed, "" if killed == 1 else "es"))
    if units:
        parts.append("%d unit%s" % (units, "" if units == 1 else "s"))
    return "%s %s; %d spared." % ("Would end" if check else "Ended", " and ".join(parts), spared)


def _diff(targets: list[dict[str, t.Any]], left: list[dict[str, t.Any]]) -> dict[str, str]:
    """Processes before and after, one a line."""

    def text(rows: list[dict[str, t.Any]]) -> str:
        return "".join("%(pid)d %(user)s %(cmdline)s\n" % row for row in sorted(rows, key=lambda row: row["pid"]))

    return {"before_header": "processes", "after_header": "processes", "before": text(targets), "after": text(left)}


def tear_down(params: t.Mapping[str, t.Any], check: bool = False, seams: Seams | None = None) -> dict[str, t.Any]:
    """Do what module gpu_teardown promises; returns its result.

    Raises CleanslateError: on options that cannot be meant and on a plan that must not be carried out, both before
    anything is signalled; and when something did not end, with what was done in its details.
    """
    seams = seams or Seams()
    # First of all: who is there to read the result.
    reader = seams.reader or Reader()
    require_kernel()
    options = PlanOptions.from_params(params)
    limits = Limits(float(params["term_timeout"]), float(params["kill_timeout"])).check()
    systemd = seams.systemd or Systemd()
    lease = Lease(params["run_dir"], params.get("lease"))
    with seams.surveyor(SurveyOptions.from_params(params)) as surveyor:

        def look(nvml: bool, memory: Memory | None = None) -> Plan:
            survey = surveyor.look(nvml=nvml)
            return make_plan(survey, options, gather(survey, options, systemd, surveyor.fs), memory)

        if check:
            lease.check()
            return _planned(look(True))
        with lease.held(float(params.get("lock_timeout") or 0.0)):
            plan = look(True)
            _refuse(plan)
            outcome = end(
                plan,
                lambda memory: look(False, memory),
                limits,
                seams.kernel(surveyor),
                systemd,
                seams.clock,
                reader,
            )
            return _done(plan, outcome)


def _refuse(plan: Plan) -> None:
    """Raise when the plan must not be carried out."""
    if plan.blocked:
        targets, spared = plan.rows()
        raise CleanslateError(
            "Nothing was ended. " + " ".join(dict.fromkeys(plan.blocked)), changed=False, planned=targets, spared=spared
        )


def _common(survey: Survey, plan: Plan) -> dict[str, t.Any]:
    return {
        "simulated": survey.simulated,
        "warnings": list(plan.warnings),
        "ports": [
            {
                "port": state.port,
                "listeners": [
                    {"address": listener.address, "pids": list(listener.pids)} for listener in state.listeners
                ],
                "time_wait": state.time_wait,
                "connections": state.connections,
                "note": state.note,
            }
            for state in plan.ports
        ],
    }


def _planned(plan: Plan) -> dict[str, t.Any]:
    _refuse(plan)
    targets, spared = plan.rows()
    for row in targets:
        row.update(signal="", seconds=None)
    units = [str(stop.key) for stop in plan.units]
    return dict(
        _common(plan.survey, plan),
        changed=not plan.empty,
        killed=targets,
        spared=spared,
        survivors=[],
        stopped_units=units,
        elapsed=0.0,
        msg=_summary(len(targets), len(units), len(spared), True),
        diff=_diff(targets + spared, spared),
    )


def _done(plan: Plan, outcome: Outcome) -> dict[str, t.Any]:
    spared = plan.rows()[1] + outcome.changed_identity
    result = dict(
        _common(plan.survey, plan),
        changed=outcome.changed,
        killed=outcome.killed,
        spared=spared,
        survivors=outcome.survivors,
        stopped_units=outcome.stopped_units,
        elapsed=outcome.elapsed,
        msg=_summary(len(outcome.killed), len(outcome.stopped_units), len(spared), False),
        diff=_diff(outcome.killed + outcome.survivors + spared, outcome.survivors + spared),
    )
    result["warnings"] += outcome.warnings
    if outcome.reason:
        details = {key: value for key, value in result.items() if key != "msg"}
        raise CleanslateError(outcome.message, reason=outcome.reason, **details)
    return result
