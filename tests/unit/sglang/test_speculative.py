# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Combinations of speculative decoding: those that SGLang lets through and dies of, and those it changes silently."""

from __future__ import annotations

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.sglang import speculative

EAGLE3 = {"algorithm": "EAGLE3", "draft_model_path": "/srv/draft"}


def check(spec, args=None, backend=None, pp_size=1):
    return speculative.check(
        {**EAGLE3, **spec}, args if args is not None else {"max_running_requests": 8}, backend, pp_size
    )


@pytest.mark.parametrize(
    ("steps", "topk", "most"), [(1, 1, 2), (3, 1, 4), (1, 4, 5), (3, 4, 37), (5, 4, 69), (5, 8, 265), (2, 10, 111)]
)
def test_most_draft_tokens_of_a_tree(steps, topk, most):
    assert speculative.candidates(steps, topk) == most


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 4},
        {"num_steps": 3, "eagle_topk": 1},
        {"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 2},
        {"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 16},
        {"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 37},
        {"num_steps": 3, "adaptive": True},
        {"algorithm": "eagle3"},
    ],
)
def test_sound_combinations_pass(spec):
    assert check(spec)[0] == []


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 38}, "outside 2 to 37"),
        ({"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 1}, "outside 2 to 37"),
        ({"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 100}, "outside 2 to 37"),
        ({"num_steps": 3, "eagle_topk": 4}, "needs num_draft_tokens"),
        ({"num_steps": 3}, "TypeError"),
        ({"eagle_topk": 1}, "AssertionError"),
        ({"num_draft_tokens": 4}, "AssertionError"),
        ({"num_steps": 0, "eagle_topk": 1}, "at least 1"),
        ({"num_steps": "3x", "eagle_topk": 1}, "no whole number"),
        ({"draft_model_path": None}, "needs draft_model_path"),
        ({"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 16, "adaptive": True}, "eagle_topk 1 only"),
        (
            {"num_steps": 3, "eagle_topk": 4, "num_draft_tokens": 16, "use_rejection_sampling": True},
            "needs eagle_topk 1",
        ),
    ],
)
def test_fatal_combinations_are_refused(spec, said):
    errors, _notes = check(spec)
    assert any(said in error.msg for error in errors)
    assert {error.variable for error in errors} == {"sglang_server_speculative"}


@pytest.mark.parametrize(
    ("backend", "args", "topk", "refused"),
    [
        ("trtllm_mha", {}, 4, True),
        ("trtllm_mha", {}, 1, False),
        ("fa3", {}, 4, False),
        ("fa3", {"page_size": 16}, 4, False),
        ("fa4", {"page_size": 16}, 4, True),
        ("fa4", {"page_size": 1}, 4, False),
        ("flex_attention", {}, 1, True),
        (None, {"page_size": 64}, 4, False),
    ],
)
def test_attention_backends(backend, args, topk, refused):
    spec = {"num_steps": 3, "eagle_topk": topk, "num_draft_tokens": 4}
    assert bool(check(spec, {"max_running_requests": 8, **args}, backend)[0]) is refused


def test_algorithm_missing():
    errors, _notes = speculative.check({"num_steps": 3}, {})
    assert "algorithm is missing" in errors[0].msg


def test_the_silent_limit_is_said_unless_declared():
    assert any("48 running requests" in note for note in check({}, {})[1])
    assert not any("48" in note for note in check({}, {"max_running_requests": 100})[1])


def test_rewritten_draft_tokens_are_said():
    errors, notes = check({"num_steps": 3, "eagle_topk": 1, "num_draft_tokens": 8})
    assert errors == []
    assert any("takes num_draft_tokens 4" in note for note in notes)


def test_pipeline_parallelism():
    assert "pp_size above 1" in check({}, pp_size=2)[0][0].msg


def test_nothing_declared_is_nothing_wrong():
    assert speculative.check({}, {}) == ([], [])
