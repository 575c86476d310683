# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""What a play would do to one instance, and what stands in its way, found while the old server still serves.

Verdicts: C(converged) (nothing to do), C(reset) (tear down, launch), C(blocked) (something must be mended first),
C(unknown) (doubt; nothing may be touched).
"""

from __future__ import annotations

import dataclasses
import os
import re
import typing as t

from ..common.clock import Clock
from ..common.errors import CleanslateError
from ..common.text import format_size, parse_size, show
from ..gpu.devices import select
from ..gpu.free import check_threshold
from ..gpu.rows import describe
from ..gpu.survey import Survey
from ..gpu.verdict import Limits, Reason, judge, without
from ..net.ports import look_at_ports
from ..proc.table import Process, ProcFS
from ..state.record import InstanceRecord, RecordStore
from ..teardown.plan import Plan, PlanOptions, gather, make_plan
from . import activity, command, models, ready, resolver
from .declaration import Declaration
from .findings import Finding, variable
from .launch import salt_of, shown_nccl
from .logs import exit_text
from .paths import cache_dir
from .prepare import Prepared, prepare
from .roles import schedulers
from .runtime import Runtime
from .systemd_backend import Systemd

CONVERGED, RESET, BLOCKED, UNKNOWN = "converged", "reset", "blocked", "unknown"
#: Bytes that NCCL and SGLang's own queues need in /dev/shm with more than one worker.
SHM_FLOOR = 256 * 1024 * 1024
RESET_VARIABLE = "cleanslate_reset"
#: Reasons of the GPUs' verdict, the variable that mends each (the declared GPUs else), and a hint.
_MENDED_BY = {
    "count_mismatch": ("gpu_teardown_expected_count", ""),
    "memory_benign_holder": ("gpu_teardown_memory_threshold", "That is gpu_teardown_memory_threshold."),
    "stale_device_node": ("", ""),
}


@dataclasses.dataclass
class Result:
    verdict: str
    reasons: list[dict[str, str]]
    blocked: list[Finding]
    notes: list[str]
    prepared: Prepared
    plan: Plan | None
    changes: list[dict[str, t.Any]]
    survey: Survey
    record: InstanceRecord | None
    resolved: dict[str, t.Any] | None = None

    @property
    def converged(self) -> bool:
        return self.verdict == CONVERGED

    def message(self) -> str:
        """One line, or one a finding."""
        name = self.prepared.declaration.name
        if self.verdict == BLOCKED:
            return "%s cannot be brought up:\n%s" % (name, "\n".join("- " + finding.msg for finding in self.blocked))
        why = "; ".join(reason["msg"] for reason in self.reasons)
        if self.verdict == CONVERGED:
            return "%s runs as declared (%s)." % (name, why)
        if self.verdict == UNKNOWN:
            return "%s is left untouched, because of doubt: %s." % (name, why)
        count = len(self.plan.targets) if self.plan else 0
        ends = "ends %d process%s" % (count, "es"[: 2 * (count != 1)]) if count else "ends nothing"
        return "%s will be reset (%s); the teardown %s." % (name, why, ends)

    def as_dict(self) -> dict[str, t.Any]:
        prepared = self.prepared
        targets, spared = self.plan.rows(self.survey) if self.plan else ([], [])
        units = [unit.key.name for unit in self.plan.units] if self.plan else []
        if self.verdict in (CONVERGED, UNKNOWN):
            # Nothing will be ended, so nothing is said to be.
            targets, units = [], []
        shown = prepared.complete.command if prepared.complete else None
        return {
            "converged": self.converged,
            "verdict": self.verdict,
            "reasons": self.reasons,
            "blocked": [finding.row() for finding in self.blocked],
            "notes": self.notes,
            "argv": shown.shown_argv() if shown else [],
            "environment": shown.shown_environment() if shown else {},
            "nccl": shown_nccl(prepared),
            "changes": self.changes,
            "resolved": self.resolved,
            "teardown": {"targets": targets, "spared": spared, "units": units},
            "gpus": [
                {"index": gpu.index, "uuid": gpu.uuid, "minor": gpu.minor, "name": gpu.name} for gpu in prepared.gpus
            ],
            "devices": teardown_devices(prepared, self.record),
            "ports": teardown_ports(prepared, self.record),
            "python": prepared.identity.python if prepared.identity else None,
            "sglang_version": prepared.identity.version if prepared.identity else None,
            "simulated": self.survey.simulated,
            "msg": self.message(),
        }


def teardown_devices(prepared: Prepared, record: InstanceRecord | None) -> list[str]:
    """The GPUs that a reset touches, by UUID: the declared ones and those that the running instance has."""
    found = [gpu.uuid or str(gpu.index) for gpu in prepared.gpus]
    return list(dict.fromkeys(found + (record.gpus if record else [])))


def teardown_ports(prepared: Prepared, record: InstanceRecord | None) -> list[int]:
    return list(dict.fromkeys(prepared.ports + (record.ports if record else [])))


class Planner:
    """One plan. The seams (C(fs), C(systemd), C(clock)) are for tests."""

    def __init__(
        self,
        declaration: Declaration,
        survey: Survey,
        teardown: t.Mapping[str, t.Any],
        state_dir: str,
        always: bool = False,
        check_mode: bool = False,
        fs: ProcFS | None = None,
        systemd: Systemd | None = None,
        clock: Clock | None = None,
        assume_ended: t.Collection[tuple[int, int]] = (),
    ) -> None:
        self.declaration = declaration
        self.survey = survey
        self.teardown = teardown
        self.state_dir = state_dir
        self.always = always
        #: Pid and start time of those whom the same run ends before this plan is carried out.
        self.assume_ended = assume_ended
        self.check_mode = check_mode
        self.fs = fs or ProcFS()
        self.systemd = systemd or Systemd()
        self.clock = clock or Clock()
        self.blocked: list[Finding] = []
        self.notes: list[str] = []

    def run(self) -> Result:
        survey, declaration = self.survey, self.declaration
        self.record = RecordStore(self.state_dir).load(declaration.name)
        prepared = self.prepared = prepare(declaration, self.state_dir, survey, self.check_mode)
        self.blocked += prepared.findings
        self.notes += prepared.notes
        here = [name for name in teardown_devices(prepared, self.record) if survey.devices.find(name)]
        if here:
            select(survey.devices, here)
            # Clients of the driver that hold none of these are spared by the teardown, which is given them.
            survey = self.survey = dataclasses.replace(
                survey, options=dataclasses.replace(survey.options, devices=tuple(here))
            )
        resolved = self._ask_sglang()
        self._look_at_models()
        self._look_at_node()
        plan = self._plan_teardown()
        changes = self._changes()
        reasons, verdict = self._judge(plan, changes)
        if self.blocked:
            verdict = BLOCKED
        return Result(
            verdict, reasons, self.blocked, self.notes, prepared, plan, changes, survey, self.record, resolved
        )

    # -- the declaration ---------------------------------------------------------------------------------------

    def _ask_sglang(self) -> dict[str, t.Any] | None:
        """The installed SGLang's own opinion; not asked about what is wrong on paper already."""
        prepared, complete = self.prepared, self.prepared.complete
        if complete is None:
            return None
        argv = complete.command.argv[3:]
        if complete.command.config:
            argv = argv[:-2]
        paths = [self.declaration.model_path, str(self.declaration.speculative.get("draft_model_path") or "")]
        try:
            answer = resolver.resolve(
                complete.identity,
                complete.environment,
                argv,
                complete.command.config,
                [path for path in paths if models.is_local(path)],
                None if self.check_mode else cache_dir(self.state_dir),
                complete.command.secrets,
                account=complete.account,
            )
        except CleanslateError as error:
            self.blocked.append(Finding("sglang", error.message, variable("python")))
            return None
        # What the paper rules say better is not said twice.
        known = {finding.variable for finding in prepared.findings}
        self.blocked += [finding for finding in answer.errors if finding.variable not in known]
        self.notes += answer.not_judged
        return answer.resolved

    def _look_at_models(self) -> None:
        declaration = self.declaration
        dummy = declaration.args.get("load_format") == "dummy"
        found, target = models.check(declaration.model_path, "model_path", weights=not dummy)
        draft_path = str(declaration.speculative.get("draft_model_path") or "")
        draft_dummy = dummy or declaration.speculative.get("draft_load_format") == "dummy"
        more, draft = models.check(draft_path, "speculative", weights=not draft_dummy)
        found += more
        if target and draft:
            found += models.compare_contexts(target, draft, declaration.args.get("context_length"))
        told = {finding.variable for finding in found}
        # A missing path explains SGLang's own complaint about it.
        self.blocked = [f for f in self.blocked if not (f.code == "sglang" and f.variable in told)] + found

    def _look_at_node(self) -> None:
        if self.survey.simulated:
            return
        for path in (
            "/etc/nccl.conf",
            os.path.join(self.prepared.account.home if self.prepared.account else "/root", ".nccl.conf"),
        ):
            names = _nccl_conf(path)
            if names:
                self.notes.append(
                    "%s sets %s for every NCCL program of this node, this server included." % (path, ", ".join(names))
                )
        if self.declaration.schedulers > 1:
            try:
                state = os.statvfs("/dev/shm")
            except OSError:
                return
            free = state.f_bavail * state.f_frsize
            if free < SHM_FLOOR:
                self.blocked.append(
                    Finding(
                        "shared_memory",
                        "/dev/shm has %s left; %d workers need %s. Remove what is stale there, or enlarge it."
                        % (format_size(free), self.declaration.schedulers, format_size(SHM_FLOOR)),
                    )
                )

    # -- what a reset would end -----------------------------------------------------------------------------------

    def _plan_teardown(self) -> Plan | None:
        params = dict(self.teardown)
        params.setdefault("scope", "match")
        if not params.get("match"):
            params.pop("match", None)
        params["instances"] = [self.declaration.name]
        params["ports"] = teardown_ports(self.prepared, self.record)
        try:
            options = PlanOptions.from_params(params)
            plan = make_plan(self.survey, options, gather(self.survey, options, fs=self.fs))
        except CleanslateError as error:
            self.blocked.append(
                Finding("teardown", error.message, "gpu_teardown_" + str(error.details.get("option", "")))
            )
            return None
        self.blocked += [Finding("container_live", msg) for msg in plan.blocked]
        # An instance that was never launched here is the ordinary case of a first launch.
        self.notes += [w for w in plan.warnings if not w.startswith("Instance %s is not known" % self.declaration.name)]
        self.members = self._members()
        self._look_for_strangers(plan)
        return plan

    def _members(self) -> list[Process]:
        if self.record is None:
            return []
        return Runtime(self.record, self.state_dir, self.fs, self.systemd).members(self.survey.table.values())

    def _look_for_strangers(self, plan: Plan) -> None:
        """Whoever and whatever would still be in the way after the teardown."""
        going = plan.target_pids | {process.pid for process in self.members}
        going |= {p.pid for p in self.survey.table.values() if (p.pid, p.start_time) in self.assume_ended}
        self._look_at_gpus(plan, going)
        for port in look_at_ports(self.fs, self.prepared.ports, self.survey.table):
            for listener in port.listeners:
                if going.intersection(listener.pids):
                    continue
                owner = next((self.survey.table[pid] for pid in listener.pids if pid in self.survey.table), None)
                who = describe(owner) if owner else "a process out of sight"
                self.blocked.append(
                    Finding(
                        "port_busy",
                        "Port %d is taken by %s on %s. End it yourself, or choose another %s."
                        % (port.port, who, listener.address, variable("port")),
                        variable("port"),
                    )
                )
        if not self.always:
            self._look_for_servers(plan)

    def _look_at_gpus(self, plan: Plan, going: set[int]) -> None:
        """Judge the GPUs by the same rules as the proof that follows a teardown, those who would go taken off."""
        if not self.survey.options.devices:
            return  # none of the declared GPUs is here, which has been said
        try:
            limits = limits_of(self.teardown)
            check_threshold(self.survey, limits)
        except CleanslateError as error:
            option = error.message.partition(":")[0]
            self.blocked.append(Finding("teardown", "gpu_teardown_" + error.message, "gpu_teardown_" + option))
            return
        ended = {(h.process.pid, h.process.start_time) for h in self.survey.holdings if h.process.pid in going}
        predicted = judge(without(self.survey, ended), limits)
        # What could not be seen at all is no finding of the declaration: the verdict becomes unknown by it.
        unseen = {"scan_incomplete", self.survey.nvml.reason}
        labels = {gpu.index: gpu.label for gpu in self.survey.devices.gpus}
        for reason in predicted.reasons:
            if reason.code not in unseen:
                finding = self._in_the_way(plan, reason, labels.get(reason.gpu, "") if reason.gpu is not None else "")
                if finding not in self.blocked:
                    self.blocked.append(finding)

    def _in_the_way(self, plan: Plan, reason: Reason, label: str) -> Finding:
        """One reason of the verdict as a finding: with the variable that mends it."""
        holding = next((h for h in self.survey.holdings if h.process.pid == reason.pid and h.counts), None)
        if reason.code in ("holder", "foreign_holder") and holding is not None:
            why = next((i for i in plan.spared if i.process.pid == reason.pid), None)
            return Finding(
                "foreign_holder",
                "%s is held by %s, which is not the instance's (%s). End it yourself, choose other GPUs in %s, or "
                "widen gpu_teardown_scope."
                % (label, describe(holding.process), why.reason if why else holding.why, variable("gpus")),
                variable("gpus"),
            )
        where, advice = _MENDED_BY.get(reason.code, (variable("gpus"), ""))
        if reason.code == "memory_no_owner" and "memory_baseline" in reason.advice:
            where = "gpu_teardown_memory_baseline"
        text = "%s%s%s." % (label, ": " if label else "", reason.message)
        if reason.code == "memory_no_owner":
            text += " SGLang would start with less KV cache, without a word."
        return Finding(reason.code, " ".join(part for part in (text, reason.advice, advice) if part), where)

    def _look_for_servers(self, plan: Plan) -> None:
        """A server that nobody recorded is somebody's as long as its main process lives, whether it answers, has too
        much to do for an answer, or still loads: it is not ended by the way."""
        own = {process.pid for process in self.members}
        for item in plan.targets:
            if item.process.pid in own or item.reason == "instance" or item.process.zombie:
                continue
            port = port_of(item.process.argv)
            if port is None:
                continue
            self.blocked.append(
                Finding(
                    "unrecorded_server",
                    "A server that this collection did not launch runs here (port %d): %s. Set %s: always to end it."
                    % (port, describe(item.process), RESET_VARIABLE),
                    RESET_VARIABLE,
                )
            )

    # -- the verdict ----------------------------------------------------------------------------------------------

    def _changes(self) -> list[dict[str, t.Any]]:
        if self.record is None or self.prepared.complete is None:
            return []
        before = self.record.details.get("declared")
        salt = salt_of(self.record)
        return command.changes(before if isinstance(before, dict) else {}, self.prepared.complete.state(salt))

    def _judge(self, plan: Plan | None, changes: list[dict[str, t.Any]]) -> tuple[list[dict[str, str]], str]:
        def reason(code: str, msg: str) -> dict[str, str]:
            return {"code": code, "msg": msg}

        if not self.survey.complete:
            hidden = ", ".join("%d" % item.pid for item in self.survey.scan.unreadable[:8])
            said = (
                "processes that cannot be read: %s" % hidden if hidden else "only some users' processes were looked at"
            )
            return [reason("scan_incomplete", said)], UNKNOWN
        if self.check_mode and self.survey.nvml.reason == "binding_missing":
            self.notes.append("nvidia-ml-py is placed by the run itself: this plan goes by the holders alone.")
        elif not self.survey.nvml.ok:
            return [reason(self.survey.nvml.reason or "nvml_unavailable", self.survey.nvml.message)], UNKNOWN
        if self.always:
            return [reason("asked", "%s is always" % RESET_VARIABLE)], RESET
        record = self.record
        if record is None:
            return [reason("not_launched", "it was never launched on this node")], RESET
        out: list[dict[str, str]] = []
        if changes:
            keys = ", ".join(str(change["key"]) for change in changes[:6])
            out.append(reason("changed", "changed: %s%s" % (keys, ", …" if len(changes) > 6 else "")))
        runtime = Runtime(record, self.state_dir, self.fs, self.systemd, self.clock)
        if self.members and runtime.follow_restart():
            self.notes.append("systemd has restarted it since its launch (main process %d)." % record.pid)
        workers = schedulers(self.members)
        listens = bool(self.members) and runtime.listens(self.members)
        loading = ""
        if not self.members:
            out.append(reason("dead", "it does not run%s" % self._how_it_ended(runtime)))
        elif not runtime.main_alive():
            out.append(reason("dead", "its main process is gone%s" % self._how_it_ended(runtime)))
        elif not record.ready_at and not listens:
            # Nobody may have waited for it: a play that was interrupted says nothing about the server.
            loading = ready.still_loads(runtime, self.declaration.ready_timeout)
            if not loading:
                out.append(reason("never_ready", "its last launch did not become ready"))
        elif len(workers) < runtime.schedulers:
            out.append(reason("worker_dead", "%d of %d workers run" % (len(workers), runtime.schedulers)))
        elif not listens:
            out.append(reason("not_listening", "it does not listen on port %d" % record.port))
        foreign = [i for i in (plan.targets if plan else []) if i.process.pid not in {p.pid for p in self.members}]
        holders = [i for i in foreign if i.process.pid in self.survey.holder_pids]
        if holders:
            out.append(
                reason("holder", "others hold its GPUs: %s" % ", ".join(describe(i.process) for i in holders[:4]))
            )
        if out:
            return out, RESET
        if loading:
            return [reason("loading", loading)], UNKNOWN
        found = activity.look(
            runtime.client(), runtime.question(), runtime.log(), self.declaration.stall_timeout, self.clock
        )
        if found.state in (activity.SERVES, activity.ADVANCES):
            if not record.ready_at and not self.check_mode:
                ready.remember(runtime, self.state_dir)
            return [reason(found.state, found.why)], CONVERGED
        return [reason(found.state, show(found.why))], RESET if found.state == activity.WEDGED else UNKNOWN

    @staticmethod
    def _how_it_ended(runtime: Runtime) -> str:
        try:
            text = exit_text(runtime.ending().code)
        except CleanslateError:
            return ""
        return " (%s)" % text if text else ""


def limits_of(teardown: t.Mapping[str, t.Any]) -> Limits:
    """What counts as free, by the options that the teardown's proof will be given. Raises CleanslateError."""
    count, threshold, baseline = map(teardown.get, ("expected_count", "memory_threshold", "memory_baseline"))
    if count is not None and count < 0:
        raise CleanslateError("expected_count: %d GPUs cannot be." % count)
    given = {"memory_threshold": parse_size(threshold, "memory_threshold")} if threshold else {}
    return Limits(
        expected_count=count,
        memory_baseline=parse_size(baseline, "memory_baseline") if baseline else None,
        **given,
    )


def port_of(argv: t.Sequence[str]) -> int | None:
    """The HTTP port of a server's command line; SGLang's own 30000 when it names none; None when it is no server."""
    if "sglang.launch_server" not in argv and "serve" not in argv:
        return None
    line = " ".join(argv)
    match = re.search(r"--port[ =](\d{1,5})\b", line)
    return int(match.group(1)) if match else 30000


def _nccl_conf(path: str) -> list[str]:
    """Names that an NCCL configuration file sets (a line is C(NAME=value); C(#) counts in the first column only)."""
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            return [show(line.partition("=")[0]) for line in handle if "=" in line and not line.startswith("#")]
    except OSError:
        return []
