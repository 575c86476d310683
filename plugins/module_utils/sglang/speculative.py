# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Speculative decoding: the combinations that SGLang lets through and dies of later, or changes without a word.

Facts (sglang 0.5.17 to 0.5.23): srt/arg_groups/speculative_hook.py, srt/speculative/eagle_utils.py,
srt/arg_groups/attention_hook.py, srt/arg_groups/validation_hook.py.
"""

from __future__ import annotations

import typing as t

from .findings import Finding, variable

VARIABLE = variable("speculative")
#: Built-in algorithms; plugins may register more.
ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM", "DFLASH", "DSPARK", "UNO")
EAGLE_FAMILY = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
#: They draft with a second model.
NEEDS_DRAFT = ("EAGLE3", "STANDALONE", "DFLASH", "DSPARK")
#: SGLang's own limit of running requests when speculation is on and none is declared (speculative_hook.py).
SILENT_LIMIT = 48
#: Attention back ends that can verify a tree (top-k above 1); with pages above 1 only the second set can.
NO_TREE = ("trtllm_mha", "flex_attention", "cutlass_mla", "trtllm_mla")
NO_SPECULATION = ("flex_attention", "torch_native")
PAGED_TREE = ("flashinfer", "fa3", "triton")
#: Names that the role offers by their short form; every other C(--speculative-X) goes by X as well.
ORDER = (
    "algorithm",
    "draft_model_path",
    "draft_model_revision",
    "num_steps",
    "eagle_topk",
    "num_draft_tokens",
    "adaptive",
    "adaptive_config",
)


def candidates(steps: int, topk: int) -> int:
    """How many tokens a draft tree can offer the verifier: the root and every drafted one (eagle_utils.py)."""
    return 1 + topk + max(0, steps - 1) * topk * topk


def check(
    speculative: t.Mapping[str, t.Any],
    args: t.Mapping[str, t.Any],
    attention_backend: str | None = None,
    pp_size: int = 1,
) -> tuple[list[Finding], list[str]]:
    """Errors and notes of one declaration's speculation."""
    errors: list[Finding] = []
    notes: list[str] = []

    def wrong(msg: str) -> None:
        errors.append(Finding("speculative", "%s: %s" % (VARIABLE, msg), VARIABLE))

    given = {key: value for key, value in speculative.items() if value is not None}
    if not given:
        return errors, notes
    algorithm = str(given.get("algorithm", "")).upper()
    if not algorithm:
        wrong("algorithm is missing; the rest (%s) would do nothing." % ", ".join(sorted(given)))
        return errors, notes
    if algorithm not in ALGORITHMS:
        notes.append("%s: %s is none of SGLang's own algorithms (%s)." % (VARIABLE, algorithm, ", ".join(ALGORITHMS)))
    numbers: dict[str, int | None] = {}
    for key in ("num_steps", "eagle_topk", "num_draft_tokens"):
        value = given.get(key)
        numbers[key] = None
        if value is None:
            continue
        try:
            numbers[key] = int(str(value))
        except ValueError:
            wrong("%s=%s is no whole number." % (key, value))
            continue
        if t.cast(int, numbers[key]) < 1:
            wrong("%s=%s: SGLang lets it through and fails later; at least 1." % (key, value))
    if errors:
        return errors, notes
    if algorithm in NEEDS_DRAFT and not given.get("draft_model_path"):
        wrong("%s needs draft_model_path; SGLang notices only while it loads." % algorithm)
    if algorithm in EAGLE_FAMILY:
        _eagle(given, numbers, args, attention_backend, wrong, notes)
    if pp_size > 1 and algorithm != "EAGLE":
        wrong("%s does not work with %s above 1." % (algorithm, variable("pp_size")))
    if algorithm in ("NGRAM", "STANDALONE") and (args.get("enable_dp_attention") or args.get("attn_dp_size")):
        wrong("%s does not work with attention data parallelism." % algorithm)
    if attention_backend in NO_SPECULATION:
        wrong("%s %s cannot speculate." % (variable("attention_backend"), attention_backend))
    if args.get("max_running_requests") is None:
        notes.append(
            "Speculation limits the server to %d running requests unless max_running_requests is declared in %s."
            % (SILENT_LIMIT, variable("args"))
        )
    return errors, notes


def _eagle(
    given: t.Mapping[str, t.Any],
    numbers: t.Mapping[str, int | None],
    args: t.Mapping[str, t.Any],
    attention_backend: str | None,
    wrong: t.Callable[[str], None],
    notes: list[str],
) -> None:
    steps, topk, tokens = numbers["num_steps"], numbers["eagle_topk"], numbers["num_draft_tokens"]
    adaptive = bool(given.get("adaptive"))
    if steps is None and (topk is not None or tokens is not None):
        wrong("eagle_topk or num_draft_tokens without num_steps makes SGLang fail (a bare AssertionError).")
        return
    if steps is None:
        notes.append("%s: num_steps, eagle_topk and num_draft_tokens are left to SGLang's choice by model." % VARIABLE)
        return
    if topk is None and not adaptive:
        wrong("num_steps without eagle_topk makes SGLang fail (a bare TypeError). Say eagle_topk: 1.")
        return
    topk = topk or 1
    if adaptive and topk > 1:
        wrong("adaptive works with eagle_topk 1 only; SGLang would switch it off with a warning.")
    if topk == 1:
        if tokens is not None and tokens != steps + 1:
            notes.append(
                "%s: with eagle_topk 1 SGLang takes num_draft_tokens %d (num_steps + 1), not %d."
                % (VARIABLE, steps + 1, tokens)
            )
        return
    if tokens is None:
        wrong("eagle_topk %d needs num_draft_tokens; without it a worker dies later." % topk)
    elif not 2 <= tokens <= candidates(steps, topk):
        wrong(
            "num_draft_tokens %d is outside 2 to %d (1 + topk + (steps - 1) * topk * topk); SGLang lets it through "
            "and a worker dies later." % (tokens, candidates(steps, topk))
        )
    if attention_backend in NO_TREE:
        wrong("eagle_topk above 1 does not work with %s %s." % (variable("attention_backend"), attention_backend))
    page_size = args.get("page_size")
    if page_size not in (None, 1, "1") and attention_backend not in (None, *PAGED_TREE):
        wrong(
            "eagle_topk above 1 with page_size %s needs %s %s."
            % (page_size, variable("attention_backend"), " or ".join(PAGED_TREE))
        )
    if args.get("speculative_use_rejection_sampling") or given.get("use_rejection_sampling"):
        wrong("use_rejection_sampling needs eagle_topk 1.")
