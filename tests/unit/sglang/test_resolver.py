# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The installed SGLang asked: by the probe, in its own Python, here the stand-in's."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.sglang import probe, resolver
from ansible_collections.cleanslate.inference.plugins.module_utils.sglang.account import Account

STANDIN = Path(__file__).resolve().parents[2] / "lab/standin"
KEY = "k-of-the-test-1234"


@pytest.fixture
def environment():
    return {"PYTHONPATH": str(STANDIN), "PATH": "/usr/bin:/bin"}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    return str(folder)


@pytest.fixture
def identity(environment):
    return resolver.find(sys.executable, environment, "/usr/bin")


def ask(identity, environment, argv, tmp_path, config=None, models=(), **more):
    return resolver.resolve(identity, environment, argv, config or {}, list(models), str(tmp_path / "cache"), **more)


def test_the_identity_says_version_and_place(identity):
    assert identity.version == "0.5.23"
    assert identity.location == str(STANDIN / "sglang")


def test_a_good_command_line_is_resolved(identity, environment, model, tmp_path):
    answer = ask(identity, environment, ["--model-path", model, "--tp-size", "2"], tmp_path)
    assert answer.errors == []
    assert answer.resolved["tp_size"] == 2


@pytest.mark.parametrize(
    ("words", "variable", "said"),
    [
        (["--no-such-flag"], "args", "unrecognized arguments: --no-such-flag"),
        (["--page-size", "many"], "args", "invalid int value: 'many'"),
        (["--cuda-graph-max-bs", "8"], "args", "write cuda_graph_max_bs_decode"),
        (["--speculative-algorithm", "EAGLE9"], "speculative", "EAGLE9"),
    ],
)
def test_a_bad_one_is_refused_by_sglangs_own_words(identity, environment, model, tmp_path, words, variable, said):
    answer = ask(identity, environment, ["--model-path", model, *words], tmp_path)
    (error,) = answer.errors
    assert error.variable == "sglang_server_" + variable
    assert said in error.msg
    assert "0.5.23" in error.msg


def test_a_model_that_is_not_there(identity, environment, tmp_path):
    answer = ask(identity, environment, ["--model-path", str(tmp_path / "nothing")], tmp_path)
    assert answer.errors[0].variable == "sglang_server_model_path"


def test_answers_are_kept_and_keys_are_not(identity, environment, model, tmp_path):
    argv, config = ["--model-path", model], {"api-key": KEY}
    first = ask(identity, environment, argv, tmp_path, config, secrets=[KEY])
    second = ask(identity, environment, argv, tmp_path, config, secrets=[KEY])
    assert (first.cached, second.cached) == (False, True)
    assert first.resolved == second.resolved
    for path in (tmp_path / "cache").iterdir():
        assert KEY not in path.read_text()
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("what", ["argv", "key", "environment", "version", "model"])
def test_whatever_matters_is_asked_anew(identity, environment, model, tmp_path, what):
    argv, config = ["--model-path", model], {"api-key": KEY}
    ask(identity, environment, argv, tmp_path, config, [model])
    if what == "argv":
        argv = [*argv, "--tp-size", "2"]
    elif what == "key":
        config = {"api-key": KEY + "5"}
    elif what == "environment":
        environment = dict(environment, SGLANG_X="1")
    elif what == "version":
        identity = identity._replace(version="0.5.24")
    else:
        path = Path(model) / "config.json"
        path.write_text(path.read_text() + "\n")
    assert not ask(identity, environment, argv, tmp_path, config, [model]).cached


def test_a_damaged_answer_is_asked_anew(identity, environment, model, tmp_path):
    ask(identity, environment, ["--model-path", model], tmp_path)
    for path in (tmp_path / "cache").iterdir():
        path.write_text("{")
    assert ask(identity, environment, ["--model-path", model], tmp_path).errors == []


def test_only_so_many_answers_are_kept(identity, environment, model, tmp_path, monkeypatch):
    monkeypatch.setattr(resolver, "KEEP", 2)
    for size in ("1", "2", "3"):
        ask(identity, environment, ["--model-path", model, "--tp-size", size], tmp_path)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def package(folder, text):
    (folder / "sglang/srt").mkdir(parents=True)
    (folder / "sglang/__init__.py").write_text("__version__ = '9.9'\n")
    (folder / "sglang/srt/__init__.py").write_text("")
    (folder / "sglang/srt/server_args.py").write_text(text)
    return {"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"}


@pytest.mark.parametrize(
    ("text", "variable", "said"),
    [
        ("import a_module_of_nobody", "python", "No module named 'a_module_of_nobody'"),
        (
            "def prepare_server_args(argv):\n    raise ValueError('speculative_x is wrong')",
            "speculative",
            "speculative_x",
        ),
        ("def prepare_server_args(argv):\n    assert 1 == 2", "args", "assert 1 == 2"),
        (
            "class A:\n    def resolve_once(self): pass\n    def check_server_args(self): assert False, 'pp'\n"
            "def prepare_server_args(argv): return A()",
            "args",
            "pp",
        ),
    ],
)
def test_other_versions_fail_in_their_own_ways(tmp_path, text, variable, said):
    environment = package(tmp_path / "other", text)
    identity = resolver.find(sys.executable, environment, "/usr/bin")
    assert identity.version == "9.9"
    (error,) = ask(identity, environment, ["--model-path", "x"], tmp_path).errors
    assert error.variable == "sglang_server_" + variable
    assert said in error.msg


@pytest.mark.parametrize(
    "message",
    [
        "No CUDA GPUs are available",
        "trtllm_mha needs Blackwell",
        "requires SM90",
        "We couldn't connect to 'https://huggingface.co'",
    ],
)
def test_what_only_the_gpu_or_the_network_can_tell_is_not_judged(tmp_path, message):
    environment = package(tmp_path / "other", "def prepare_server_args(argv): raise RuntimeError(%r)" % message)
    identity = resolver.find(sys.executable, environment, "/usr/bin")
    answer = ask(identity, environment, ["--model-path", "x"], tmp_path)
    assert answer.errors == []
    assert message in answer.not_judged[0]


def test_what_sglang_prints_does_not_disturb(tmp_path):
    text = (
        "print('{}')\nclass A:\n    x = 1\ndef prepare_server_args(argv):\n"
        "    print('noise')\n    a = A()\n    a.y = {1}\n    return a"
    )
    environment = package(tmp_path / "other", text)
    identity = resolver.find(sys.executable, environment, "/usr/bin")
    assert ask(identity, environment, [], tmp_path).resolved == {"y": [1]}


def test_no_gpu_is_in_sight_and_no_key_in_ps(tmp_path):
    text = (
        "import os\nclass A: pass\ndef prepare_server_args(argv):\n    a = A()\n"
        "    a.gpus = os.environ['CUDA_VISIBLE_DEVICES']\n    a.ps = open('/proc/self/cmdline').read()\n    return a"
    )
    environment = package(tmp_path / "other", text)
    identity = resolver.find(sys.executable, environment, "/usr/bin")
    environment["CUDA_VISIBLE_DEVICES"] = "0,1"
    resolved = ask(identity, environment, [], tmp_path, {"api-key": KEY}).resolved
    assert resolved["gpus"] == ""
    assert KEY not in resolved["ps"]


def test_a_probe_that_hangs_is_ended(tmp_path):
    environment = package(tmp_path / "other", "import signal\nsignal.pause()")
    identity = resolver.find(sys.executable, environment, "/usr/bin")
    with pytest.raises(CleanslateError, match="did not say within"):
        ask(identity, environment, [], tmp_path, timeout=0.5)


@pytest.mark.parametrize("other", [True, False])
def test_the_probe_runs_as_the_servers_account(identity, environment, tmp_path, monkeypatch, other):
    """SGLang may run the model's own code."""
    started = []

    def popen(*_args, **options):
        started.append({key: options.get(key) for key in ("user", "group", "extra_groups")})
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Account, "groups", [44, 1000])
    monkeypatch.setattr(resolver.subprocess, "Popen", popen)
    account = Account("llm", 1000, 1000, "/home/llm", other)
    with pytest.raises(CleanslateError):
        ask(identity, environment, [], tmp_path, account=account)
    with pytest.raises(CleanslateError):
        resolver.find(sys.executable, environment, "/usr/bin", account)
    wanted = {"user": 1000, "group": 1000, "extra_groups": [44, 1000]} if other else dict.fromkeys(started[0])
    assert started == [wanted, wanted]


def test_an_interpreter_that_dies_says_so(tmp_path):
    environment = package(tmp_path / "other", "import os\nos._exit(3)")
    identity = resolver.find(sys.executable, environment, "/usr/bin")
    with pytest.raises(CleanslateError, match="exit 3"):
        ask(identity, environment, [], tmp_path)


class TestFind:
    def test_the_declared_one_alone_is_tried(self, environment):
        with pytest.raises(CleanslateError, match=r"sglang_server_python.*/nowhere/python"):
            resolver.find("/nowhere/python", environment, "/usr/bin")

    def test_a_python_without_sglang_is_named(self, tmp_path):
        with pytest.raises(CleanslateError, match="has no sglang"):
            resolver.find(sys.executable, {"PATH": "/usr/bin"}, "/usr/bin")

    def test_the_console_script_leads_to_its_python(self, environment, tmp_path):
        script = tmp_path / "sglang"
        script.write_text("#!%s\n" % sys.executable)
        script.chmod(0o755)
        assert resolver.find(None, environment, "%s:/usr/bin" % tmp_path).python == sys.executable

    def test_a_console_script_that_cannot_be_read_leads_nowhere(self, environment, tmp_path, monkeypatch):
        monkeypatch.setattr(resolver.shutil, "which", lambda name, path: str(tmp_path) if name == "sglang" else None)
        assert resolver.candidates(None, "/usr/bin")[-1] == sys.executable


def test_the_probe_is_a_program_of_its_own():
    """It runs where nothing of this collection is."""
    source = Path(probe.__file__).read_text()
    assert "from ." not in source
    assert "ansible" not in source


def test_a_package_of_another_name_in_the_way_is_not_mistaken(tmp_path):
    """The version comes from the package that would be imported, not from metadata of another one."""
    (tmp_path / "meta/sglang-0.1.dist-info").mkdir(parents=True)
    (tmp_path / "meta/sglang-0.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.1\n")
    environment = {"PYTHONPATH": os.pathsep.join([str(STANDIN), str(tmp_path / "meta")]), "PATH": "/usr/bin"}
    assert resolver.find(sys.executable, environment, "/usr/bin").version == "0.5.23"
