# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From declarations to command lines: spelling, types, keys kept out, changes told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.sglang import command, proof
from ansible_collections.cleanslate.inference.plugins.module_utils.sglang.declaration import Declaration

STANDIN = Path(__file__).resolve().parents[2] / "lab/standin"
KEY = "sk-test-0123456789abcdef"


def declare(**fields):
    return Declaration.from_params("main", {"model_path": "/srv/m", **fields})


def build(declaration, nccl=None, gpus=("GPU-a", "GPU-b")):
    return command.build(declaration, "/opt/sglang/bin/python", list(gpus), nccl or {}, "/state/config.yaml")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("chunked_prefill_size", 8192, ["--chunked-prefill-size", "8192"]),
        ("chunked_prefill_size", -1, ["--chunked-prefill-size", "-1"]),
        ("mem_fraction_static", 0.85, ["--mem-fraction-static", "0.85"]),
        ("schedule_conservativeness", 1.0, ["--schedule-conservativeness", "1.0"]),
        ("enable_metrics", True, ["--enable-metrics"]),
        ("enable_metrics", False, []),
        ("lora_strict_loading", False, ["--no-lora-strict-loading"]),
        ("lora_strict_loading", True, ["--lora-strict-loading"]),
        ("anything", None, []),
        ("cuda_graph_bs_decode", [1, 2, 4], ["--cuda-graph-bs-decode", "1", "2", "4"]),
        ("forward_hooks", [{"a": True}], ["--forward-hooks", '[{"a":true}]']),
        ("json_model_override_args", {"b": None, "a": False}, ["--json-model-override-args", '{"a":false,"b":null}']),
        ("lora_paths", ["a=/x", "b=/y"], ["--lora-paths", "a=/x", "b=/y"]),
        ("lora_paths", [{"lora_name": "a"}], ["--lora-paths", '{"lora_name": "a"}']),
        ("chat_template", 'it\'s $5 100% "ü"', ["--chat-template", 'it\'s $5 100% "ü"']),
    ],
)
def test_one_argument(field, value, words):
    assert command.words(field, value) == words


def test_the_order_is_stable_and_names_are_whole():
    first = build(
        declare(args={"b_thing": 1, "a-thing": 2}, tp_size=2, speculative={"num_steps": 3, "algorithm": "eagle3"})
    )
    assert first.argv[:3] == ["/opt/sglang/bin/python", "-m", "sglang.launch_server"]
    assert (
        first.argv[3:]
        == (
            "--model-path /srv/m --host 127.0.0.1 --port 30000 --tp-size 2 --speculative-algorithm EAGLE3 "
            "--speculative-num-steps 3 --a-thing 2 --b-thing 1"
        ).split()
    )


def test_keys_are_in_the_file_and_nowhere_else():
    made = build(
        declare(
            api_key=KEY,
            admin_api_key=KEY + "2",
            args={"ssl_keyfile_password": "pw-of-the-test", "enable_metrics": True},
        )
    )
    assert KEY not in " ".join(made.argv)
    assert "pw-of-the-test" not in " ".join(made.argv)
    assert made.argv[-2:] == ["--config", "/state/config.yaml"]
    assert json.loads(made.config_text()) == {
        "api-key": KEY,
        "admin-api-key": KEY + "2",
        "ssl-keyfile-password": "pw-of-the-test",
    }


def test_without_keys_there_is_no_file():
    made = build(declare())
    assert made.config == {}
    assert "--config" not in made.argv


def test_environment():
    made = build(
        declare(environment={"A": True, "B": 2, "C": None, "HF_TOKEN": KEY}),
        {"NCCL_ALGO": "Ring", "NCCL_SOCKET_IFNAME": "=bond0"},
    )
    assert made.environment == {
        "A": "1",
        "B": "2",
        "HF_TOKEN": KEY,
        "NCCL_ALGO": "Ring",
        "NCCL_SOCKET_IFNAME": "=bond0",
        "GLOO_SOCKET_IFNAME": "bond0",
        "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b",
        "SPT_NOENV": "1",
        "CLEANSLATE_INSTANCE": "main",
    }
    assert KEY not in str(made.shown_environment())


def test_a_declared_gloo_interface_stays():
    made = build(declare(environment={"GLOO_SOCKET_IFNAME": "lo"}), {"NCCL_SOCKET_IFNAME": "eth0"})
    assert made.environment["GLOO_SOCKET_IFNAME"] == "lo"


def state(salt="s", **fields):
    made = declare(**fields)
    return command.declared_state(made, build(made), "0.5.23", salt)


def test_no_secret_in_what_is_recorded():
    recorded = state(api_key=KEY, environment={"HF_TOKEN": "t-of-the-test", "URL": "http://x/?k=" + KEY})
    assert KEY not in str(recorded)
    assert "t-of-the-test" not in str(recorded)


@pytest.mark.parametrize(
    ("before", "after", "keys"),
    [
        ({}, {}, []),
        ({"tp_size": 2}, {"tp_size": 4}, ["--tp-size"]),
        ({"api_key": "old-key"}, {"api_key": "new-key"}, ["--api-key"]),
        ({}, {"api_key": "new-key"}, ["--api-key"]),
        ({"environment": {"X": "1"}}, {"environment": {"X": 1}}, []),
        ({"environment": {"HF_TOKEN": "a"}}, {"environment": {"HF_TOKEN": "b"}}, ["environment HF_TOKEN"]),
        ({"args": {"enable_metrics": True}}, {}, ["--enable-metrics"]),
        ({"args": {"page_size": 1}}, {"args": {"--page-size": 1}}, []),
        ({"backend": "process"}, {"backend": "systemd"}, ["backend"]),
    ],
)
def test_changes_are_told_by_key(before, after, keys):
    found = command.changes(state(**before), state(**after))
    assert [change["key"] for change in found] == keys
    assert not any("hidden:" in str(change) or "-key'" in str(change["after"]) for change in found)


def test_fingerprints_depend_on_the_records_own_salt():
    assert state(salt="a", api_key=KEY)["--api-key"] != state(salt="b", api_key=KEY)["--api-key"]


def test_digests_tell_arguments_from_environment():
    one, two = state(tp_size=1), state(tp_size=2)
    assert command.digest(one, environment=False) != command.digest(two, environment=False)
    assert command.digest(one, environment=True) == command.digest(two, environment=True)


ARGS = [
    {"max_running_requests": 64, "enable_metrics": True, "page_size": 16},
    {"json_model_override_args": {"rope_scaling": {"factor": 2.0, "on": True}}},
    {"cuda_graph_bs_decode": [1, 2, 4, 8], "lora_strict_loading": False},
    {"chunked_prefill_size": -1, "context_length": "8k", "log_level": "warning"},
    {"bucket_time_to_first_token": [0.1, 0.5], "limit_mm_data_per_request": {"image": 2}},
    {"served_model_names_of_nobody": 1},
]
PARSE = """
import json, sys
from sglang.srt.server_args import prepare_server_args
for argv in json.load(sys.stdin):
    try:
        print("ok", prepare_server_args(argv).model_path)
    except SystemExit as error:
        print("exit", error.code)
    except Exception as error:
        print("error", type(error).__name__, error)
"""


def test_rendered_command_lines_go_through_the_real_flag_table():
    """The stand-in's parser is made from the real one's table."""
    lines = [build(declare(args=args, speculative={"algorithm": "NGRAM"}, tp_size=2)).argv[3:] for args in ARGS]
    done = subprocess.run(
        [sys.executable, "-c", PARSE],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(STANDIN), "PATH": "/usr/bin:/bin"},
        timeout=60,
    )
    assert done.stdout.split("\n")[:-1] == ["ok /srv/m"] * (len(ARGS) - 1) + ["exit 2"]


TABLE = json.loads((STANDIN / "sglang/flags.json").read_text(encoding="utf-8"))["flags"]
VALUES = {
    "int": 3,
    "float": 0.5,
    "loads": {"a": True},
    "human_readable_int": "1k",
    "json_list_type": [{"a": None}],
    "parse_cuda_graph_config_arg": {"decode": {"backend": "full"}},
    "parse_cuda_graph_backend_arg": "full",
}


def sample(entry):
    """A value of the natural type of one argument."""
    if entry.get("action") == "DeprecatedStoreConstAction":
        return None
    if entry.get("action") in ("_StoreTrueAction", "BooleanOptionalAction", "DeprecatedStoreTrueAction"):
        return True
    if entry["dest"] == "lora_paths":
        return ["a=/x", "b=/y"]
    if entry["dest"] == "log_level":
        return "warning"
    value = entry["choices"][0] if entry.get("choices") else VALUES.get(str(entry.get("type")), "text")
    return [value, value] if entry.get("nargs") in ("+", "*") else value


def test_no_argument_of_the_real_parser_is_out_of_reach():
    """Every flag of the table, by its field name and a value of its natural type."""
    wanted, lines = [], []
    for entry in TABLE:
        flag = next(name for name in entry["flags"] if name.startswith("--"))
        value = sample(entry)
        if flag in ("--help", "--config", "--model-path") or value is None:
            continue
        wanted.append(flag)
        lines.append(["--model-path", "/srv/m", *command.words(flag[2:].replace("-", "_"), value)])
    done = subprocess.run(
        [sys.executable, "-c", PARSE],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(STANDIN), "PATH": "/usr/bin:/bin"},
        timeout=120,
    )
    answers = done.stdout.splitlines()
    refused = {flag: answer for flag, answer in zip(wanted, answers, strict=True) if answer != "ok /srv/m"}
    assert refused == {}
    assert len(wanted) > 500


def test_what_is_known_of_flags_is_what_the_table_says():
    def having(key, value):
        return {entry["flags"][0][2:].replace("-", "_") for entry in TABLE if entry.get(key) == value}

    assert having("action", "BooleanOptionalAction") == command.PAIRED
    assert having("type", "json_list_type") == command.JSON_LISTS


@pytest.mark.parametrize(
    ("field", "wanted", "effective", "fine"),
    [
        ("model_path", "s3://bucket/model", "/root/.cache/model", True),
        ("model_path", "org/model", "/root/.cache/huggingface/hub/models--org--model", True),
        ("speculative_draft_model_path", "org/draft", "/root/.cache/draft", True),
        ("model_path", "/srv/model/q4.gguf", "/srv/model", True),
        ("model_path", "/srv/model", "/srv/other", False),
        ("model_path", "/srv/model", "/srv/model", True),
    ],
)
def test_names_that_sglang_replaces_are_no_other_model(field, wanted, effective, fine):
    (row,) = proof.compare_arguments({field: wanted}, {field: effective})
    assert (row["equal"] or bool(row.get("reason"))) is fine
    assert (proof.verdict([], [row], 0, {"x": 1}) == []) is fine
