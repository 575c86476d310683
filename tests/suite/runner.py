# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run stages, two at a time where they allow it, and print their lines in the order of the table."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from leftovers import end_left_behind
from stage import BUILD, LOGS, ROOT, Outcome, Stage, read_junit

#: Tells what a stage started. With the pid, because several checkouts may be checked at the same time.
MARK = f"CLEANSLATE_STAGE_{os.getpid()}"
BESIDE_EACH_OTHER = 2
TAIL_LINES = 60


class Runner:
    """Runs stages; ``strict`` turns what was skipped into failures."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self._stopped = False

    def run(self, stages: Sequence[Stage]) -> int:
        """Run all of them and print one line each and the sum; the exit code."""
        LOGS.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        outcomes = []
        for outcome in self._outcomes(stages):
            outcomes.append(outcome)
            self._report(outcome)
        passed, failed, skipped = (sum(getattr(o, key) for o in outcomes) for key in ("passed", "failed", "skipped"))
        left_out = [o for o in outcomes if o.skipped and o.reason]
        if left_out:
            print(f"\nLeft out: {'; '.join(f'{o.stage.name} ({o.reason})' for o in left_out)}")
        print(f"\n{time.monotonic() - began:.0f} s")
        print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
        return 1 if failed or not passed else 0

    def stop(self) -> None:
        """End the stages that are running, and start no more."""
        with self._lock:
            self._stopped = True
            for group in self._running:
                _signal_group(group, signal.SIGTERM)

    def _outcomes(self, stages: Iterable[Stage]) -> Iterator[Outcome]:
        for shared, batch in groupby(stages, key=lambda stage: stage.shares_machine):
            with ThreadPoolExecutor(BESIDE_EACH_OTHER if shared else 1) as pool:
                yield from pool.map(self._outcome, batch)

    def _outcome(self, stage: Stage) -> Outcome:
        missing = [reason for reason in (need() for need in stage.needs) if reason]
        if missing:
            return self._judge(Outcome(stage, skipped=1, reason=", ".join(missing)))
        log = LOGS / f"{stage.name}.log"
        began = time.monotonic()
        reason = self._execute(stage, log)
        seconds = time.monotonic() - began
        if stage.junit is None:
            return Outcome(stage, passed=not reason, failed=bool(reason), seconds=seconds, reason=reason, log=log)
        try:
            passed, failed, skipped = read_junit(stage.junit)
        except ValueError as error:
            return Outcome(stage, failed=1, seconds=seconds, reason=reason or str(error), log=log)
        if reason and not failed:  # for instance an error while the tests were collected
            failed = 1
        return self._judge(Outcome(stage, passed, failed, skipped, seconds, reason, log))

    def _judge(self, outcome: Outcome) -> Outcome:
        if not (self.strict and outcome.skipped):
            return outcome
        reason = outcome.reason or f"{outcome.skipped} tests were skipped"
        return replace(
            outcome, failed=outcome.failed + outcome.skipped, skipped=0, reason=f"{reason}; with CI=true nothing may be"
        )

    def _execute(self, stage: Stage, log: Path) -> str:
        """Run the command; empty when it succeeded, otherwise what went wrong."""
        if stage.junit is not None:
            stage.junit.parent.mkdir(parents=True, exist_ok=True)
            if stage.junit.is_dir():
                shutil.rmtree(stage.junit)
            stage.junit.unlink(missing_ok=True)
        with log.open("wb") as output:
            with self._lock:
                if self._stopped:
                    return "interrupted"
                try:
                    process = subprocess.Popen(
                        [str(word) for word in stage.command],
                        cwd=stage.cwd,
                        env={**environment(stage), MARK: stage.name},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                except OSError as error:
                    return f"could not start: {error}"
                self._running.add(process.pid)
            reason = self._wait(process, stage.timeout)
            with self._lock:
                self._running.discard(process.pid)
            left = end_left_behind(f"{MARK}={stage.name}", process.pid)
            return reason or (f"left running: {', '.join(left)}" if left else "")

    def _wait(self, process: subprocess.Popen[bytes], timeout: float) -> str:
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            # TERM first: the stage may have something to clean up.
            _signal_group(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                _signal_group(process.pid, signal.SIGKILL)
                process.wait()
            return f"not done after {timeout:.0f} s"
        if code:
            return f"exit code {code}"
        return ""

    def _report(self, outcome: Outcome) -> None:
        verdict = "FAILED" if outcome.failed else "ok" if outcome.passed else "skipped"
        counts = ""
        if outcome.stage.junit is not None and outcome.log is not None:
            counts = f"{outcome.passed} passed, {outcome.failed} failed, {outcome.skipped} skipped"
        details = "; ".join(part for part in (counts, outcome.reason) if part)
        print(f"{verdict:<8} {outcome.stage.name:<22} {outcome.seconds:6.1f} s  {details}".rstrip(), flush=True)
        if outcome.failed and outcome.log is not None:
            lines = outcome.log.read_text(errors="replace").splitlines()
            for line in lines[-TAIL_LINES:]:
                print(f"    | {line}")
            print(f"    the whole output: {outcome.log.relative_to(ROOT)}", flush=True)


def environment(stage: Stage) -> dict[str, str]:
    """The same for everyone: no setting of the user's own Ansible or Python, the checkout's tools first on PATH."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("ANSIBLE_", "MOLECULE_", "PYTEST_", "MAKE", "MFLAGS")) and key not in _FOREIGN
    }
    return {
        **kept,
        "PATH": f"{stage.tools}:{kept.get('PATH', os.defpath)}",
        "VIRTUAL_ENV": str(stage.tools.parent),
        "LC_ALL": "C.UTF-8",
        "ANSIBLE_HOME": str(BUILD / "ansible"),
        "NO_COLOR": "1",
        **stage.env,
    }


_FOREIGN = frozenset({"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "FORCE_COLOR", "COLUMNS"})


def _signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass  # it ended by itself
