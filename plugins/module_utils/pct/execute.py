# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Module pct_exec: bring containers into a state, run commands in them, container by container.

A container's failure is its own: the others are still done. All waits look at the container's state, with a deadline.
"""

from __future__ import annotations

import dataclasses
import typing as t

from ..common.clock import Clock, Deadline
from ..common.text import command_line, show
from .enter import BOOTED, Machine, PctProblem, Whereabouts, explain
from .wanted import Command, Wanted

#: pct's own time, on top of what it is told to wait.
_MARGIN = 60.0
_PAUSE, _LONGEST_PAUSE = 0.1, 1.0


class Reader(t.Protocol):
    def check(self) -> None:
        """Raise when nobody reads the result any more."""


@dataclasses.dataclass(frozen=True)
class Options:
    #: Seconds.
    start_timeout: float = 60.0
    stop_timeout: float = 60.0
    lock_timeout: float = 0.0
    force_stop: bool = False
    #: C(booted) or C(running).
    wait_for: str = "booted"
    #: C(fail) or C(skip).
    elsewhere: str = "fail"


class Executor:
    def __init__(
        self, machine: Machine, options: Options, reader: Reader, check_mode: bool = False, clock: Clock | None = None
    ) -> None:
        self.machine = machine
        self.options = options
        self.reader = reader
        self.check_mode = check_mode
        self.clock = clock or Clock()
        #: What check mode has brought about so far, so that a container named twice is told right.
        self.predicted: dict[int, bool] = {}

    def run(self, wanted: t.Sequence[Wanted]) -> dict[str, t.Any]:
        """The module's result. Raises CleanslateError, and what the reader raises."""
        self.machine.check()
        rows = []
        for entry in wanted:
            self.reader.check()
            rows.append(self._container(entry))
        failed = [row for row in rows if row["failed"]]
        result: dict[str, t.Any] = {
            "changed": any(row["changed"] for row in rows),
            "failed": bool(failed),
            "containers": rows,
            "diff": diffs(rows),
        }
        if failed:
            result["msg"] = "\n".join("container %d: %s" % (row["vmid"], row["msg"]) for row in failed)
        return result

    # -- one container -------------------------------------------------------------------------------------------------

    def _container(self, wanted: Wanted) -> dict[str, t.Any]:
        started = self.clock.now()
        row: dict[str, t.Any] = {
            "vmid": wanted.vmid,
            "name": "",
            "node": "",
            "status_before": "",
            "status": "",
            "state_changed": False,
            "changed": False,
            "failed": False,
            "skipped": False,
            "code": "",
            "msg": "",
            "commands": [],
        }
        try:
            self._bring(wanted, row)
            self._commands(wanted, row)
        except PctProblem as problem:
            row.update(failed=True, code=problem.code, msg=problem.message)
            self._as_it_is(row)
        row["changed"] = row["state_changed"] or any(command["changed"] for command in row["commands"])
        row["seconds"] = round(self.clock.now() - started, 2)
        return row

    def _bring(self, wanted: Wanted, row: dict[str, t.Any]) -> None:
        """Find the container and bring it into the wanted state."""
        place = self.machine.find(wanted.vmid)
        row["node"] = show(place.node)
        if place.conf is not None:
            row["name"] = show(place.conf.name(wanted.vmid))
        if place.kind == "elsewhere" and self.options.elsewhere == "skip":
            row.update(skipped=True, code="elsewhere", msg="it is on node %s" % show(place.node))
            return
        _refuse(wanted.vmid, place)
        runs = self._runs(wanted.vmid)
        row["status_before"] = row["status"] = "running" if runs else "stopped"
        steps = _steps(wanted.state, runs)
        if not steps:
            return
        self._await_lock(wanted.vmid)
        for step in steps:
            self.reader.check()
            if self.check_mode:
                self.predicted[wanted.vmid] = step == "start"
            elif step == "start":
                self._start(wanted.vmid)
            else:
                self._stop(wanted.vmid)
            row["status"] = "running" if step == "start" else "stopped"
            row["state_changed"] = True

    def _as_it_is(self, row: dict[str, t.Any]) -> None:
        """After a failure: what state the container is in, and whether that is another one than before."""
        if row["status_before"] and not self.check_mode:
            row["status"] = "running" if self.machine.runs(row["vmid"]) else "stopped"
            row["state_changed"] = row["state_changed"] or row["status"] != row["status_before"]

    def _runs(self, vmid: int) -> bool:
        return self.predicted.get(vmid, False) if vmid in self.predicted else self.machine.runs(vmid)

    def _await_lock(self, vmid: int) -> None:
        """A backup or a migration holds a lock; commands run beside it, starts and stops do not."""
        lock = ""

        def free() -> bool:
            nonlocal lock
            conf = self.machine.find(vmid).conf
            lock = conf.lock if conf is not None else ""
            return not lock

        if not self._wait(free, 0.0 if self.check_mode else self.options.lock_timeout):
            text = "it is locked (%s): wait for its end (option lock_timeout), or `pct unlock %d`"
            raise PctProblem("locked", text % (show(lock), vmid))

    def _start(self, vmid: int) -> None:
        deadline = Deadline(self.clock, self.options.start_timeout)
        ended = self.machine.pct(["start", str(vmid)], timeout=self.options.start_timeout + _MARGIN)
        if ended.returncode != 0 and not self.machine.runs(vmid):
            raise self._failed("start", vmid, ended)
        if not self._wait(lambda: self.machine.runs(vmid), deadline.left):
            raise PctProblem("start_failed", "it started and ended again at once: see `pct start %d --debug`" % vmid)
        if self.options.wait_for == "booted":
            self._await_boot(vmid, deadline)

    def _await_boot(self, vmid: int, deadline: Deadline) -> None:
        said = ""

        def up() -> bool:
            nonlocal said
            command = Command(("/bin/sh", "-c", BOOTED), timeout=max(1.0, deadline.left))
            try:
                ran = self.machine.attach(vmid, command)
            except PctProblem as problem:
                if problem.code in ("no_shell", "not_root"):
                    raise
                said = problem.message
                return False
            said = "systemctl says: %s" % (show(ran.stdout.strip()) or "nothing")
            return ran.code == 0

        if not self._wait(up, deadline.left):
            text = "it runs, and was not up within %g s (option start_timeout); %s"
            raise PctProblem("start_timeout", text % (self.options.start_timeout, said))

    def _stop(self, vmid: int) -> None:
        seconds = self.options.stop_timeout
        words = ["shutdown", str(vmid), "--timeout", str(max(1, round(seconds)))]
        if self.options.force_stop:
            words += ["--forceStop", "1"]
        ended = self.machine.pct(words, timeout=seconds + _MARGIN)
        # pct may give up while the container is ending, or find that it has ended by itself.
        grace = 0.0 if ended.returncode else seconds
        if not self._wait(lambda: not self.machine.runs(vmid), grace):
            raise self._failed("stop", vmid, ended)

    def _failed(self, verb: str, vmid: int, ended: t.Any) -> PctProblem:
        problem = PctProblem("error", "pct took too long") if ended.timed_out else self._explain(ended, vmid)
        if problem.code == "error":
            more = "" if verb == "start" else "; force_stop: true ends it by force"
            return PctProblem(verb + "_failed", "it did not %s: %s%s" % (verb, problem.message, more))
        return problem

    def _explain(self, ended: t.Any, vmid: int) -> PctProblem:
        problem = explain(ended, vmid)
        if problem.code == "missing":
            # It was here a moment ago: say where it is now.
            try:
                _refuse(vmid, self.machine.find(vmid))
            except PctProblem as better:
                return better
        return problem

    def _wait(self, condition: t.Callable[[], bool], seconds: float) -> bool:
        deadline, pause = Deadline(self.clock, seconds), _PAUSE
        while not condition():
            if deadline.over:
                return False
            self.reader.check()
            self.clock.pause(min(pause, deadline.left))
            pause = min(_LONGEST_PAUSE, pause * 1.5)
        return True

    # -- commands ------------------------------------------------------------------------------------------------------

    def _commands(self, wanted: Wanted, row: dict[str, t.Any]) -> None:
        if row["skipped"] or not wanted.commands:
            return
        if row["status"] != "running":
            raise PctProblem("not_running", "it does not run, and its state is to stay as it is: no command was run")
        for index, command in enumerate(wanted.commands):
            self.reader.check()
            line = {"index": index, "cmd": command_line(command.argv), "changed": False, "skipped": False, "reason": ""}
            row["commands"].append(line)
            # In check mode a container that would have to be started first cannot be asked.
            if self.check_mode and not self.machine.runs(wanted.vmid):
                line.update(skipped=True, reason="check_mode", changed=command.changed_when is not False)
                continue
            self._command(wanted.vmid, command, line)

    def _command(self, vmid: int, command: Command, line: dict[str, t.Any]) -> None:
        started = self.clock.now()
        try:
            if self.check_mode and not command.creates and not command.removes:
                line.update(skipped=True, reason="check_mode", changed=command.changed_when is not False)
                return
            ran = self.machine.attach(vmid, command, look=self.check_mode)
        except PctProblem as problem:
            line["failed"] = True
            raise PctProblem(problem.code, "%s: %s" % (line["cmd"], problem.message)) from None
        if ran.code is None:
            reason = {"creates": "creates", "removes": "removes"}.get(ran.skipped, "check_mode")
            line.update(
                skipped=True, reason=reason, changed=reason == "check_mode" and command.changed_when is not False
            )
            return
        line.update(
            rc=ran.code,
            stdout=ran.stdout,
            stderr=ran.stderr,
            truncated=ran.cut,
            seconds=round(self.clock.now() - started, 2),
            changed=command.changed_when is not False,
            failed=ran.code not in command.ok_codes,
        )
        if line["failed"]:
            said = (ran.stderr.strip() or ran.stdout.strip()).splitlines()
            last = ": %s" % show(said[-1]) if said else ""
            raise PctProblem("command_failed", "%s ended with %d%s" % (line["cmd"], ran.code, last))


def _steps(state: str, runs: bool) -> list[str]:
    if state == "running":
        return [] if runs else ["start"]
    if state == "stopped":
        return ["stop"] if runs else []
    if state == "restarted":
        return ["stop", "start"] if runs else ["start"]
    return []


def _refuse(vmid: int, place: Whereabouts) -> None:
    """Raise PctProblem where the container is not one of this node's."""
    if place.kind == "missing":
        raise PctProblem("missing", "there is no container %d in this cluster" % vmid)
    if place.kind == "vm":
        raise PctProblem("not_a_container", "%d is a virtual machine (on node %s), no container" % (vmid, place.node))
    if place.kind == "elsewhere":
        raise PctProblem("elsewhere", "it is on node %s: run this there" % show(place.node))
    if place.conf is not None and place.conf.template:
        raise PctProblem("template", "it is a template, which never runs")


def diffs(rows: t.Iterable[t.Mapping[str, t.Any]]) -> list[dict[str, str]]:
    """States before and after, and the commands that changed something, of each container that changed."""
    return [_diff(row) for row in rows if row["changed"]]


def _diff(row: t.Mapping[str, t.Any]) -> dict[str, str]:
    name = "container %d (%s)" % (row["vmid"], row["name"])
    ran = "".join("ran: %s\n" % command["cmd"] for command in row["commands"] if command["changed"])
    return {
        "before_header": name,
        "after_header": name,
        "before": "status: %s\n" % row["status_before"],
        "after": "status: %s\n%s" % (row["status"], ran),
    }
