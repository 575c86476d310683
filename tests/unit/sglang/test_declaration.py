# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A declaration on paper: every error at once, each with the variable to change."""

from __future__ import annotations

import dataclasses

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.sglang.declaration import (
    DECLARATION_SPEC,
    Declaration,
    check,
)


def declare(**fields):
    return Declaration.from_params("main", {"model_path": "/srv/m", **fields})


def test_the_spec_and_the_class_have_the_same_fields_and_defaults():
    fields = {field.name: field for field in dataclasses.fields(Declaration)}
    assert set(fields) - {"name"} == set(DECLARATION_SPEC)
    made = declare()
    for name, option in DECLARATION_SPEC.items():
        if name != "model_path":
            assert getattr(made, name) == option.get("default"), name


def test_a_sound_declaration_passes():
    checked = check(declare(tp_size=4, mem_fraction_static=0.85, args={"chunked_prefill_size": 8192}))
    assert checked.errors == []


@pytest.mark.parametrize(
    ("fields", "variable", "said"),
    [
        ({"model_path": ""}, "model_path", "is missing"),
        ({"tp_size": 0}, "tp_size", "less than 1"),
        ({"mem_fraction_static": 85.0}, "mem_fraction_static", "between 0 and 1"),
        ({"port": 70000}, "port", "65535"),
        ({"served_model_name": "a:b"}, "served_model_name", "no ':'"),
        ({"gpus": ["0", "0"]}, "gpus", "twice"),
        ({"api_key": "-abc"}, "api_key", "may not begin"),
        ({"api_key": "a\nb"}, "api_key", "printable"),
        ({"api_key": "schlüssel"}, "api_key", "ASCII"),
        ({"api_key": "abc"}, "api_key", "at least 4"),
        ({"stall_timeout": 0.0}, "stall_timeout", "above 0"),
        ({"args": {"tp_size": 2}}, "args", "change sglang_server_tp_size"),
        ({"args": {"tensor-parallel-size": 2}}, "args", "change sglang_server_tp_size"),
        ({"args": {"--model": "x"}}, "args", "change sglang_server_model_path"),
        ({"args": {"config": "x.yaml"}}, "args", "config may not be set"),
        ({"args": {"Bad Name": 1}}, "args", "no name of an argument"),
        ({"args": {"page_size": 1, "page-size": 2}}, "args", "two spellings"),
        ({"environment": {"A B": 1}}, "environment", "no name of a variable"),
        ({"environment": {"CUDA_VISIBLE_DEVICES": "0"}}, "environment", "change sglang_server_gpus"),
        ({"environment": {"SPT_NOENV": "1"}}, "environment", "sets it itself"),
        ({"environment": {"X": "a\nb"}}, "environment", "one line"),
        ({"environment": {"X": ["a"]}}, "environment", "one line"),
        (
            {"speculative": {"algorithm": "NGRAM", "num_steps": 3}, "args": {"speculative_num_steps": 3}},
            "args",
            "set here and in sglang_server_speculative",
        ),
    ],
)
def test_what_is_wrong_names_the_variable(fields, variable, said):
    found = [error for error in check(declare(**fields)).errors if error.variable == "sglang_server_" + variable]
    assert any(said in error.msg for error in found)


def test_all_errors_come_at_once():
    wrong = declare(port=0, tp_size=0, nccl={"BUFFSIZE": "4M"}, speculative={"num_steps": 3}, args={"host": "x"})
    assert {error.variable for error in check(wrong).errors} == {
        "sglang_server_port",
        "sglang_server_tp_size",
        "sglang_server_nccl",
        "sglang_server_speculative",
        "sglang_server_args",
    }


def test_a_bad_name_is_refused_before_it_becomes_a_path():
    with pytest.raises(CleanslateError, match="is no name"):
        Declaration.from_params("../../etc/passwd", {"model_path": "/srv/m"})


@pytest.mark.parametrize(
    ("fields", "workers"),
    [
        ({}, 1),
        ({"tp_size": 4}, 4),
        ({"tp_size": 2, "dp_size": 2}, 4),
        ({"tp_size": 2, "pp_size": 2}, 4),
        ({"tp_size": 4, "dp_size": 4, "args": {"enable_dp_attention": True}}, 4),
        ({"tp_size": 4, "args": {"attn_dp_size": 4}}, 4),
        ({"tp_size": 16, "args": {"nnodes": 2}}, 8),
    ],
)
def test_how_many_workers_run_here(fields, workers):
    assert declare(**fields).schedulers == workers


def test_secrets_are_found_wherever_they_are_declared():
    made = declare(
        api_key="k1-long",
        admin_api_key="k2-long",
        environment={"HF_TOKEN": "k3-long", "X": "y"},
        args={"ssl_keyfile_password": "k4-long"},
    )
    assert made.secrets() == ["k1-long", "k2-long", "k3-long", "k4-long"]
