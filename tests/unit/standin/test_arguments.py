# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The stand-in's command line: refused as the real argparse refuses, resolved as the real resolver does."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path

import pytest

LAB = Path(__file__).resolve().parents[2] / "lab"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return tmp_path / "model"


@pytest.fixture
def prepare(monkeypatch: pytest.MonkeyPatch):
    """The stand-in's prepare_server_args; neither the package nor its logging stays behind."""
    monkeypatch.syspath_prepend(str(LAB / "standin"))
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    from sglang.srt.server_args import prepare_server_args

    yield prepare_server_args
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]


@pytest.fixture
def resolved(prepare, model: Path):
    def resolve(*words: str) -> dict:
        arguments = prepare(["--model-path", str(model), *words])
        arguments.resolve_once()
        arguments.check_server_args()
        return arguments.resolved_dict()

    return resolve


EAGLE = ("--speculative-algorithm", "EAGLE3")


# The last lines as sglang 0.5.23's own parser writes them.
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--tp-size x", "argument --tp-size/--tensor-parallel-size: invalid int value: 'x'"),
        ("--tp-size 4", "the following arguments are required: --model-path/--model"),
        ("--model m --zzz", "unrecognized arguments: --zzz"),
        ("--model m stray", "unrecognized arguments: stray"),
        (
            "--model m --pp 2",
            "ambiguous option: --pp could match --pp-size, --pp-max-micro-batch-size, --pp-async-batch-depth",
        ),
        (
            "--model m --cuda-graph-max-bs 8",
            "ambiguous option: --cuda-graph-max-bs could match --cuda-graph-max-bs-decode, --cuda-graph-max-bs-prefill",
        ),
        ("--model m --speculative-num-steps 3x", "argument --speculative-num-steps: invalid int value: '3x'"),
        (
            "--model m --context-length 1.5Ki",
            "argument --context-length: Decimals are not allowed with IEC suffixes like 'Ki'. Use an integer IEC value "
            "such as '1Ki', or an SI value such as '1.5K'.",
        ),
        ("--model m --extra-metric-labels {", "argument --extra-metric-labels: invalid loads value: '{'"),
        ("--model m --skip-tokenizer-init=1", "argument --skip-tokenizer-init: ignored explicit argument '1'"),
        ("--model m --port", "argument --port: expected one argument"),
        (
            "--model m --cuda-graph-backend-decode tc_piecewise",
            "argument --cuda-graph-backend-decode: tc_piecewise was removed; select breakable, full, or disabled",
        ),
    ],
)
def test_a_wrong_line_is_refused(prepare, capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        prepare(line.split())
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"sglang serve: error: {message}"


def test_a_wrong_choice_names_the_right_ones(prepare, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prepare(["--model", "m", "--dtype", "int3"])
    error = capsys.readouterr().err.splitlines()[-1].replace("'", "")
    assert error.endswith("invalid choice: int3 (choose from auto, half, float16, bfloat16, float, float32)")


def test_aliases_abbreviations_and_types(prepare) -> None:
    arguments = prepare(
        "--model m --tensor-parallel-size 4 --max-total-tokens 1.5k --mem-fraction-s 0.3 --no-dllm-fdfo "
        "--enable-metrics --lora-paths a=b --cuda-graph-bs-decode 1 2".split()
    )
    assert (arguments.model_path, arguments.tp_size, arguments.max_total_tokens) == ("m", 4, 1500)
    assert (arguments.mem_fraction_static, arguments.dllm_fdfo, arguments.enable_metrics) == (0.3, False, True)
    assert (arguments.lora_paths, arguments.cuda_graph_bs_decode) == (["a=b"], [1, 2])
    assert arguments.launch_command.startswith("--model m --tensor-parallel-size 4")


def test_the_table_has_all_flags_and_fields() -> None:
    table = json.loads((LAB / "standin/sglang/flags.json").read_text())
    assert table["version"] == "0.5.23"
    assert (len(table["flags"]), len(table["fields"])) == (531, 546)
    named = {flag for row in table["flags"] for flag in row["flags"]}
    assert {"--speculative-num-draft-tokens", "--attn-dp-size", "--disable-cuda-graph", "--config"} <= named


# -- --config ----------------------------------------------------------------------------------------------------------


def test_a_config_file_is_merged_and_the_line_wins(prepare, tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text('{"api-key": "k", "tp-size": 4, "enable-metrics": true, "skip-tokenizer-init": false, "port": 1}')
    arguments = prepare(["--model", "m", "--config", str(file), "--port", "31000"])
    assert (arguments.api_key, arguments.tp_size, arguments.port) == ("k", 4, 31000)
    assert arguments.enable_metrics is True and arguments.skip_tokenizer_init is False


def test_a_config_file_given_with_an_equals_sign_is_ignored(prepare, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text('{"tp-size": 4}')
    assert prepare(["--model", "m", f"--config={tmp_path}/s.yaml"]).tp_size == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("s.json", "{}", "Config file must be YAML format, got: .json"),
        ("s.yaml", "[1]", "Config file must contain a dictionary at root level"),
        ("s.yaml", '{"lora-paths": ["a"]}', "Unsupported config option 'lora_paths' with action 'LoRAPathAction'"),
        ("s.yaml", '{"dllm-fdfo": true}', "Unsupported config option 'dllm_fdfo' with action 'BooleanOptionalAction'"),
        (
            "s.yaml",
            '{"disable-cuda-graph": true}',
            "Unsupported config option 'disable_cuda_graph' with action 'DeprecatedStoreTrueAction'",
        ),
    ],
)
def test_a_wrong_config_file(prepare, tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        prepare(["--model", "m", "--config", str(tmp_path / name)])


def test_a_key_with_underscores_in_the_config_is_an_unknown_flag(prepare, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text('{"tp_size": 4}')
    with pytest.raises(SystemExit):
        prepare(["--model", "m", "--config", str(tmp_path / "s.yaml")])


# -- Resolution --------------------------------------------------------------------------------------------------------


def speculation(resolved: dict) -> tuple:
    return tuple(resolved[f"speculative_{name}"] for name in ("num_steps", "eagle_topk", "num_draft_tokens"))


def test_what_is_filled_in(resolved, model: Path) -> None:
    plain = resolved()
    assert plain["served_model_name"] == plain["tokenizer_path"] == str(model)
    assert (plain["device"], plain["chunked_prefill_size"], plain["max_running_requests"]) == ("cuda", 8192, None)
    assert plain["attention_backend"] == "fa3"
    assert plain["cuda_graph_config"]["decode"]["max_bs"] == 256
    assert resolved("--tp-size", "4", "--max-running-requests", "32")["cuda_graph_config"]["decode"]["max_bs"] == 32


def test_speculation_caps_the_running_requests(resolved) -> None:
    assert resolved(*EAGLE)["max_running_requests"] == 48
    assert resolved(*EAGLE, "--max-running-requests", "100")["max_running_requests"] == 100


def test_a_llama_gets_a_tree_by_default_and_others_do_not(resolved, model: Path) -> None:
    tree = resolved(*EAGLE)
    assert speculation(tree) == (5, 4, 8) and tree["attention_backend"] == "flashinfer"
    (model / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    assert speculation(resolved(*EAGLE)) == (3, 1, 4)


def test_one_branch_rewrites_the_draft_tokens(resolved) -> None:
    words = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 9".split()
    assert speculation(resolved(*EAGLE, *words)) == (3, 1, 4)


def test_adaptive_speculation_has_its_own_steps(resolved) -> None:
    adaptive = resolved(*EAGLE, "--speculative-adaptive")
    assert speculation(adaptive) == (3, 1, 4)
    with pytest.raises(ValueError, match="--speculative-num-steps=2 is not in the adaptive config"):
        resolved(*EAGLE, "--speculative-adaptive", "--speculative-num-steps", "2")
    assert resolved(*EAGLE, "--speculative-adaptive", *"--speculative-num-steps 3 --speculative-eagle-topk 4".split())[
        "speculative_adaptive"
    ] is False  # fmt: skip


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("--speculative-algorithm EAGLE9", ValueError, "Unknown speculative algorithm name: EAGLE9"),
        ("--speculative-algorithm EAGLE3 --speculative-eagle-topk 1", AssertionError, "^$"),
        ("--speculative-algorithm EAGLE3 --speculative-num-steps 3", TypeError, "NoneType"),
        (
            "--speculative-algorithm eagle --attention-backend trtllm_mha --speculative-num-steps 3 "
            "--speculative-eagle-topk 4 --speculative-num-draft-tokens 8",
            ValueError,
            "trtllm_mha backend only supports topk = 1",
        ),
        (
            "--speculative-algorithm EAGLE3 --page-size 16 --attention-backend flashmla",
            ValueError,
            "topk > 1 with page_size > 1 is only supported on",
        ),
        ("--speculative-algorithm EAGLE3 --pp-size 2", AssertionError, "only supports EAGLE"),
        ("--speculative-algorithm EAGLE3 --speculative-draft-model-path /no/such", OSError, "in the form 'repo_name'"),
        ("--speculative-draft-sink-size 4", ValueError, "requires --speculative-draft-window-size"),
        ("--tp-size 3 --nnodes 2", AssertionError, "divisible by number of nodes"),
        ("--dp-size 2 --nnodes 2 --tp-size 2", AssertionError, "multi-node data-parallel replicas"),
        ("--served-model-name a:b", AssertionError, "cannot contain a colon"),
        ("--base-gpu-id -1", AssertionError, "base_gpu_id must be non-negative"),
        ("--chunked-prefill-size 100 --page-size 16", AssertionError, "divisible by page_size"),
    ],
)
def test_what_the_resolver_refuses(resolved, line: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        resolved(*line.split())


def test_resolution_happens_once(prepare, model: Path) -> None:
    arguments = prepare(["--model-path", str(model)])
    arguments.resolve_once()
    seed = arguments.resolved_dict()["random_seed"]
    arguments.resolve_once()
    assert arguments.resolved_dict()["random_seed"] == seed and arguments.random_seed is None


def test_a_failed_resolution_cannot_be_repeated(prepare) -> None:
    arguments = prepare(["--model-path", "/no/such/model"])
    with pytest.raises(
        OSError, match="Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/no/such/model'"
    ):
        arguments.resolve_once()
    with pytest.raises(RuntimeError, match="resolution already failed"):
        arguments.resolve_once()
