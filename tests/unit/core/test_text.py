# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Nothing raw reaches a terminal, no secret leaves, nothing harmless is hidden, sizes mean what they say."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.common.text import (
    HIDDEN,
    command_line,
    format_size,
    is_secret_name,
    parse_size,
    redact_argv,
    redact_value,
    show,
)

# What a process may call itself: any bytes, as /proc gives them.
hostile = st.binary(max_size=60).map(lambda raw: raw.decode("utf-8", "surrogateescape")) | st.text(max_size=60)


@given(hostile)
@example("\x1b]0;title\x07\x1b[2J")
@example("a\u202egnp.exe")
@example("\ud800\U000e0001\x9b31m\u2028")
def test_shown_text_is_printable_and_encodable(text: str) -> None:
    shown = show(text)
    assert shown.isprintable()
    shown.encode("utf-8")


def test_shown_text_names_each_byte() -> None:
    assert show("sglang::scheduler_TP0") == "sglang::scheduler_TP0"
    assert show("Zażółć 模型") == "Zażółć 模型"
    assert show(b"a\xff\x00\n".decode("utf-8", "surrogateescape")) == r"a\xff\x00\x0a"
    assert show("\u202e\U000e0001") == r"\u202e\U000e0001"


@given(st.lists(hostile, max_size=8))
def test_a_command_line_is_one_short_printable_line(argv: list[str]) -> None:
    line = command_line(argv, limit=50)
    assert line.isprintable()
    assert len(line) <= 50


def test_a_huge_command_line_costs_no_time() -> None:
    started = time.process_time()
    command_line(["a" * 2_000_000, *["\\\"'--x-token" * 2000] * 50, "http://" * 100_000, "x" + " " * 1_000_000])
    assert time.process_time() - started < 2


def test_an_empty_argument_stays_visible() -> None:
    assert command_line(["prog", "", "x"]) == "prog '' x"


SECRET = "Zq7-s3cr3t+/=value"
OPTIONS = ["--api-key", "--admin-api-key", "--api_key", "--apiKey", "--hf-token", "-token", "--ssl-keyfile-password"]
OPTIONS += ["--control-plane-api-keys", "--api-k", "--api", "--admin", "--password", "--aws-secret-access-key"]
VARIABLES = ["HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "DB_PASS", "MYSQL_PWD", "_AUTH_TOKEN"]
VARIABLES += ["GITHUB_PAT", "WANDB_API_KEY", "NGC_API_KEY", "clientSecret", "HUGGING_FACE_HUB_TOKEN", "TOKEN"]


@pytest.mark.parametrize("option", OPTIONS)
def test_the_value_of_a_secret_option_is_hidden(option: str) -> None:
    assert redact_argv(["p", option, SECRET, "--port", "1"]) == ["p", option, HIDDEN, "--port", "1"]
    assert redact_argv(["p", option + "=" + SECRET, "x"]) == ["p", option + "=" + HIDDEN, "x"]


@pytest.mark.parametrize("variable", VARIABLES)
def test_the_value_of_a_secret_variable_is_hidden(variable: str) -> None:
    assert redact_argv(["env", variable + "=" + SECRET, "p"]) == ["env", variable + "=" + HIDDEN, "p"]
    assert SECRET not in " ".join(redact_argv(["docker", "run", "--env=" + variable + "=" + SECRET]))


@pytest.mark.parametrize(
    "argv",
    [
        ["bash", "-c", "exec python3 -m sglang.launch_server --api-key %s --port 30000"],
        ["bash", "-c", "HF_TOKEN=%s python3 -m sglang.launch_server"],
        ["bash", "-c", "python3 serve.py --api-key '%s x' --port 1"],
        ["python3 -m sglang.launch_server --api-key %s --port 30000"],  # a title
        ["curl", "-H", "Authorization: Bearer %s", "http://h"],
        ["curl", "-H", "authorization:Basic %s"],
        ["curl", "-H", "Proxy-Authorization: Digest a %s"],
        ["curl", "-H", "X-Api-Key: %s"],
        ["curl", "-H", "Cookie: session=1; id=%s"],
        ["curl", "http://h/v1?a=1&access_token=%s&b=2"],
        ["p", "--json", '{"api_key": "%s", "port": 1}'],
        ["p", "--json", '{\\"api_key\\": \\"%s x\\"}'],
        ["p", "--log", "ServerArgs(model_path='m', api_key='%s', port=1)"],
        ["redis", "redis://:%s@h/0"],
        ["pip", "https://user:%s@with@signs@host/simple"],
        ["npm", "//registry.example.org/:_authToken=%s"],
        ["p", "Bearer %s"],
    ],
    ids=lambda argv: argv[-1][:40],
)
def test_a_secret_inside_a_word_is_hidden(argv: list[str]) -> None:
    secret = "Zq7s3cr3tvalue"
    words = [word.replace("%s", secret) for word in argv]
    assert secret not in " ".join(redact_argv(words))
    assert secret not in command_line(words)
    assert redact_argv(words)[0].split()[0] == argv[0].split()[0]


@pytest.mark.parametrize(
    "value",
    [
        "hf_AbCdEfGhIjKlMnOpQrSt",
        "sk-proj-abcdefghijkl0123456789",
        "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
        "github_pat_11ABCDEFG0abcdefghijkl_mn",
        "nvapi-abcdefghijklmnop_-0123",
        "glpat-abcdefghij0123456789",
        "AKIAIOSFODNN7EXAMPLE",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abc-_",
    ],
)
def test_what_looks_like_a_secret_is_hidden_wherever_it_stands(value: str) -> None:
    for text in (value, "x %s y" % value, "prefix_" + value, '["%s"]' % value):
        assert value[8:] not in redact_value(text)


# Letters that cannot occur in the words around it, so that finding one of them is finding a leak.
secrets = st.text("ŻŁĄ", min_size=3, max_size=12)


@given(secrets, st.sampled_from(OPTIONS), st.lists(st.sampled_from(["--port", "1", "-v", "x=y", "--", ""]), max_size=4))
def test_no_secret_leaks_from_any_place_of_a_command_line(secret: str, option: str, others: list[str]) -> None:
    for argv in ([*others, option, secret, *others], [*others, option + "=" + secret, *others]):
        assert not set("ŻŁĄ") & set("".join(redact_argv(argv)))


@given(st.lists(st.text("ŻŁĄ*", min_size=1, max_size=6), max_size=4), st.text("ŻŁĄ* ab", max_size=30))
def test_known_secrets_are_hidden_by_value(known: list[str], text: str) -> None:
    assume(not any(set(secret) <= {"*"} for secret in known))
    hidden = redact_value(text, [*known, ""])
    assert not any(secret in hidden.replace(HIDDEN, "") for secret in known if secret in text and "*" not in secret)
    assert redact_value("--x=" + text) == "--x=" + text


def test_a_known_secret_is_hidden_whole_when_another_is_part_of_it() -> None:
    assert redact_argv(["--note=abcdef", "abc"], ["abc", "abcdef"]) == ["--note=" + HIDDEN, HIDDEN]


HARMLESS = [
    ["--max-total-tokens", "4096"],
    ["--tokenizer-path", "/models/x"],
    ["--speculative-num-draft-tokens", "4"],
    ["--speculative-token-map", "thunlp/map"],
    ["--max-prefill-tokens=16384"],
    ["--skip-tokenizer-init", "--port", "30000"],
    ["--tokenizer-worker-num", "2"],
    ["--tokenizer-metrics-custom-labels-header", "x-labels"],
    ["--ssl-keyfile", "/etc/key.pem"],
    ["--ssl-certfile", "/etc/cert.pem"],
    ["--piecewise-cuda-graph-tokens", "64"],
    ["--enable-forward-pass-metrics", "--forward-pass-metrics-worker-id", "3"],
    ["--attention-backend", "fa3"],
    ["--page-size", "64"],
    ["--disable-radix-cache"],
    ["--keyspace", "x"],
    ["--monkey", "x"],
    ["--author", "x"],
    ["--additional-config", "x"],
    ["--password-file", "/run/secret"],
    ["--speculative-draft-model-path", "lmsys/sk-eagle-three-long-name"],
    ["SGLANG_INIT_NEW_TOKEN_RATIO=0.7"],
    ["SGLANG_USE_AITER_FP8_PER_TOKEN=1"],
    ["SGLANG_SYNC_TOKEN_IDS_ACROSS_TP=1"],
    ["SGLANG_SIMULATE_ACC_TOKEN_MODE=x"],
    ["SGLANG_LOG_DECODE_GRAPH_KEY=1"],
    ["SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION=1"],
    ["SGLANG_KV_CANARY_PERTURB_NEXT_TOKEN_SWAP_PROB=0.1"],
    ["SGLANG_PREFILL_DELAYER_TOKEN_USAGE_LOW_WATERMARK=0.1"],
    ["SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK=128"],
    ["NCCL_IB_PKEY=0x8001"],
    ["TOKENIZERS_PARALLELISM=false"],
    ["HF_TOKEN_PATH=/root/token"],
    ["SSH_AUTH_SOCK=/run/agent"],
    ["PWD=/root"],
    ["sglang::scheduler_TP0"],
    ["http://127.0.0.1:30000/v1"],
    ["git@github.com:owner/repo"],
    ["ssh://git@host:22/x"],
    ["Decode batch. #running-req: 1, #token: 33, token usage: 0.05, gen throughput (token/s): 773.1"],
    ["Prefill batch. #new-seq: 1, #new-token: 512, #cached-token: 0"],
    ["ServerArgs(api_key=None, admin_api_key=None, tokenizer_path='x')"],
    ['{"api_key": null, "max_new_tokens": 5}'],
]


@pytest.mark.parametrize("argv", HARMLESS, ids=lambda argv: argv[0][:40])
def test_nothing_harmless_is_hidden(argv: list[str]) -> None:
    assert redact_argv(["python3", *argv, "tail"]) == ["python3", *argv, "tail"]
    assert redact_value(" ".join(argv)) == " ".join(argv)


def test_a_hidden_value_is_hidden_once() -> None:
    assert redact_value("x a_token=b_token=y --port 1") == "x a_token=" + HIDDEN + " --port 1"


def test_a_flag_without_a_value_hides_no_other_option() -> None:
    assert redact_argv(["--enable-auth", "--port", "1"]) == ["--enable-auth", "--port", "1"]


@given(st.dictionaries(st.sampled_from(["model", "port", "api_key", "hf_token"]), secrets, max_size=4))
def test_secrets_in_json_are_hidden_and_the_rest_stays(data: dict[str, str]) -> None:
    hidden = json.loads(redact_value(json.dumps(data)).replace(": " + HIDDEN, ': "%s"' % HIDDEN))
    assert hidden == {name: HIDDEN if is_secret_name(name) else value for name, value in data.items()}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1000", 1000),
        ("128MiB", 128 << 20),
        ("128 mib", 128 << 20),
        ("128MB", 128 << 20),
        ("128m", 128 << 20),
        ("1.5 GiB", 3 << 29),
        ("2T", 2 << 40),
        ("64 B", 64),
        (" 1K ", 1024),
        ("9007199254740993", 9007199254740993),
        ("0.1K", 102),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "memory_threshold") == size


def test_a_number_is_a_size_in_bytes() -> None:
    assert parse_size(4096, "x") == 4096


@pytest.mark.parametrize(
    "text",
    ["", "-1", "MiB", "1e3", "1 2", "5iB", "1.", ".5", "1,5G", "0x10", "1PiB", "nan", "inf", "True", "1\u212a", "٣MiB"]
    + ["9" * 400, "1\x1b[31m"],
)
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(CleanslateError, match="memory_threshold") as error:
        parse_size(text, "memory_threshold")
    assert error.value.message.isprintable()


@given(st.text(max_size=12) | st.from_regex(r"\s*\d+(\.\d+)?\s*[KMGTkmgt]?i?B?\s*", fullmatch=True))
def test_a_size_is_a_number_or_an_error(text: str) -> None:
    try:
        assert parse_size(text, "x") >= 0
    except CleanslateError as error:
        assert error.message.isprintable()


@given(st.integers(0, 2**60))
def test_a_shown_size_is_near_the_true_one(size: int) -> None:
    shown = parse_size(format_size(size), "x")
    assert abs(shown - size) <= (1024 if size < 1 << 20 else max(1 << 19, size // 100))


def test_shown_sizes() -> None:
    sizes = [None, 512, 2048, 644939776, 20 << 30]
    assert [format_size(size) for size in sizes] == ["unknown", "512 B", "2 KiB", "615 MiB", "20.0 GiB"]
