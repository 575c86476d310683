# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Wait until GPUs are proven free, or until waiting is of no use."""

from __future__ import annotations

import dataclasses
import typing as t

from ..common.clock import Clock, Deadline
from ..common.errors import CleanslateError
from ..common.text import format_size, parse_size, show
from ..proc.identity import require_kernel
from .survey import Survey, SurveyOptions, Surveyor
from .verdict import FREE, Limits, Note, Reason, Verdict, judge, without

#: Memory comes back up to 0.4 s after its last holder has gone (measured, H200): looked at so often meanwhile, from the
#: beginning of one look to that of the next, and for so long (seconds).
_EAGER_INTERVAL = 0.005
_EAGER = 1.0


@dataclasses.dataclass(frozen=True)
class FreeOptions:
    limits: Limits = dataclasses.field(default_factory=Limits)
    #: Seconds to wait, and from the beginning of one look to that of the next.
    timeout: float = 30.0
    interval: float = 0.05
    #: So many looks in a row must be clean: monitoring tools come and go, and memory lags its holder.
    stable_polls: int = 2

    def check(self) -> None:
        """Raise CleanslateError on values that mean nothing, naming the option."""
        if not 0 <= self.timeout < float("inf"):
            raise CleanslateError("timeout: %g s is no time to wait; give 0 or more." % self.timeout)
        if not 0 < self.interval < float("inf"):
            raise CleanslateError("interval: %g s between two looks is too short; give more than 0." % self.interval)
        if self.stable_polls < 1:
            raise CleanslateError("stable_polls: at least one look is needed, not %d." % self.stable_polls)
        if self.limits.memory_threshold < 0:
            raise CleanslateError("memory_threshold: give 0 or more.")
        if self.limits.expected_count is not None and self.limits.expected_count < 0:
            raise CleanslateError("expected_count: %d GPUs cannot be." % self.limits.expected_count)


class Proof(t.NamedTuple):
    verdict: Verdict
    #: Seconds.
    waited: float
    polls: int

    def data(self) -> dict[str, t.Any]:
        return {**self.verdict.data(), "waited": round(self.waited, 3), "polls": self.polls}


def prove_free(surveyor: Surveyor, options: FreeOptions, clock: Clock | None = None) -> Proof:
    """Look until the GPUs are free in C(stable_polls) looks in a row, something permanent shows, or time is over.

    A clean look is followed up even when the time is over: a verdict is not cut short.
    """
    options.check()
    deadline = Deadline(clock or Clock(), options.timeout)
    clean = polls = 0
    unseen: frozenset[int | None] = frozenset()
    still = 0
    held = 0.0
    while True:
        began = deadline.elapsed
        survey = surveyor.look()
        check_threshold(survey, options.limits)
        verdict = judge(survey, options.limits)
        polls += 1
        clean = clean + 1 if verdict.verdict == FREE else 0
        # Processes come and go that may not be looked at. Where the same ones stay, and nothing else stands against
        # the verdict, waiting is of no use.
        codes = {reason.code for reason in verdict.reasons}
        gaps = frozenset(reason.pid for reason in verdict.reasons)
        still = still + 1 if codes == {"scan_incomplete"} and gaps == unseen else 0
        unseen = gaps
        hopeless = verdict.permanent or still >= options.stable_polls
        if clean >= options.stable_polls or hopeless or (deadline.over and not clean):
            return Proof(verdict, deadline.elapsed, polls)
        named = [reason.pid for reason in verdict.reasons if reason.code in ("holder", "foreign_holder")]
        holders = {pid for pid in named if pid is not None}
        if holders:
            held = deadline.elapsed
        eager = not clean and not holders and deadline.elapsed - held < _EAGER
        interval = min(options.interval, _EAGER_INTERVAL) if eager else options.interval
        pause = max(0.0, interval - (deadline.elapsed - began))
        surveyor.pause(pause if clean else min(pause, deadline.left), holders, deadline.clock)


def predict_free(
    surveyor: Surveyor, options: FreeOptions, ended: t.Collection[tuple[int, int]], clock: Clock | None = None
) -> tuple[Proof, Verdict]:
    """One look, judged as it is and as it will be when these processes have ended (check mode)."""
    options.check()
    deadline = Deadline(clock or Clock(), 0.0)
    survey = surveyor.look()
    check_threshold(survey, options.limits)
    measured = Proof(judge(survey, options.limits), deadline.elapsed, 1)
    return measured, _with_binding(judge(without(survey, ended), options.limits))


def _with_binding(predicted: Verdict) -> Verdict:
    """The prediction where nvidia-ml-py is missing: check mode places nothing, the run itself begins by doing so.

    Holders alone decide then, and a note says it. What was measured stays unknown.
    """

    def missing(reason: Reason) -> bool:
        return reason.code == "binding_missing"

    if not any(missing(reason) for reason in predicted.machine):
        return predicted
    note = Note("binding_missing", "nvidia-ml-py is placed by the run itself: predicted from the holders alone")
    return Verdict(
        predicted.survey,
        [
            dataclasses.replace(gpu, blind=[reason for reason in gpu.blind if not missing(reason)])
            for gpu in predicted.gpus
        ],
        [reason for reason in predicted.machine if not missing(reason)],
        [*predicted.machine_notes, note],
    )


def check_threshold(survey: Survey, limits: Limits) -> None:
    """Raise CleanslateError when every GPU would pass, however full."""
    for gpu in survey.devices.selected:
        total = gpu.nvml.memory_total if gpu.nvml is not None else None
        if total is not None and limits.memory_threshold >= total:
            raise CleanslateError(
                "memory_threshold: %s is as much as %s has (%s), so that any use of it would count as free. Give what "
                "an idle GPU may show, for example 128MiB."
                % (format_size(limits.memory_threshold), gpu.label, format_size(total))
            )


def identities(rows: t.Iterable[t.Mapping[str, t.Any]], option: str) -> frozenset[tuple[int, int]]:
    """Pid and start time of each row. Raises CleanslateError naming C(option) when one lacks them."""
    out = set()
    for row in rows:
        try:
            out.add((int(row["pid"]), int(row["start_time"])))
        except (KeyError, TypeError, ValueError):
            raise CleanslateError(
                "%s: each entry needs the numbers pid and start_time, as the rows of gpu_teardown have them; got %r."
                % (option, show(str(row))[:200])
            ) from None
    return frozenset(out)


def check_free(params: t.Mapping[str, t.Any], check_mode: bool) -> dict[str, t.Any]:
    """Module gpu_free: its parameters in, its result out. Raises CleanslateError on parameters that mean nothing."""
    require_kernel()
    ended = params["assume_ended"]
    if ended is not None and not check_mode:
        raise CleanslateError(
            "assume_ended: only check mode may leave processes out. Outside of it, end them first (gpu_teardown)."
        )
    baseline = params["memory_baseline"]
    options = FreeOptions(
        Limits(
            params["expected_count"],
            parse_size(params["memory_threshold"], "memory_threshold"),
            parse_size(baseline, "memory_baseline") if baseline is not None else None,
        ),
        params["timeout"],
        params["interval"],
        params["stable_polls"],
    )
    options.check()
    gone = identities(ended, "assume_ended") if ended is not None else frozenset()
    with Surveyor(SurveyOptions.from_params(params)) as surveyor:
        if ended is None:
            return prove_free(surveyor, options).data()
        proof, predicted = predict_free(surveyor, options, gone)
    result = proof.data()
    # Who will have ended is no reason any more, also where others keep the GPUs busy.
    if gone or predicted.verdict != proof.verdict.verdict:
        notes = [note.message for note in predicted.machine_notes if note.code == "binding_missing"]
        result["msg"] = " ".join(["Once %d processes have ended: %s" % (len(gone), predicted.message), *notes])
    return dict(
        result,
        predicted_verdict=predicted.verdict,
        predicted_reasons=[*dict.fromkeys(r.code for r in predicted.reasons)],
    )
