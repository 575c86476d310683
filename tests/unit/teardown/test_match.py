# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which process is which program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.proc.table import Process, ProcFS
from ansible_collections.cleanslate.inference.plugins.module_utils.teardown.match import (
    DEFAULT_MATCH,
    first_match,
    parse_match,
    python_call,
)

from ..proctree import ProcTree

PYTHON = "/usr/bin/python3.12"


@pytest.fixture
def tree(tmp_path: Path) -> ProcTree:
    return ProcTree(tmp_path)


def made(tree: ProcTree, **process: Any) -> Process:
    tree.add(900, **process)
    return ProcFS(str(tree.proc)).process(900)


def hits(entry: Any, process: Process) -> bool:
    return parse_match([entry])[0].matches(process)


LAUNCHER = {"module": "sglang.launch_server"}


@pytest.mark.parametrize(
    "argv",
    [
        ["python3", "-m", "sglang.launch_server", "--port", "30000"],
        ["/opt/venv/bin/python3", "-m", "sglang.launch_server"],
        ["python3.12", "-u", "-m", "sglang.launch_server"],
        ["python", "-um", "sglang.launch_server"],
        ["python", "-msglang.launch_server", "--tp", "2"],
        ["python3", "-X", "faulthandler", "-W", "ignore", "-m", "sglang.launch_server"],
        ["python3", "-Xdev", "-Wignore", "-Im", "sglang.launch_server"],
        ["python3", "--check-hash-based-pycs", "never", "-m", "sglang.launch_server"],
    ],
)
def test_a_module_is_found_behind_every_option(tree: ProcTree, argv: list[str]) -> None:
    assert hits(LAUNCHER, made(tree, argv=argv, exe=PYTHON))


@pytest.mark.parametrize(
    ("argv", "exe"),
    [
        (["vim", "sglang.launch_server.log"], "/usr/bin/vim"),
        (["vim", "-m", "sglang.launch_server"], "/usr/bin/vim"),
        (["bash", "-c", "python3 -m sglang.launch_server --port 30000"], "/usr/bin/bash"),
        (["ssh", "node", "python3", "-m", "sglang.launch_server"], "/usr/bin/ssh"),
        (["python3", "/root/.ansible/tmp/AnsiballZ_gpu_teardown.py", "sglang.launch_server"], PYTHON),
        (["python3", "-c", "import sys", "-m", "sglang.launch_server"], PYTHON),
        (["python3", "watch.py", "-m", "sglang.launch_server"], PYTHON),
        (["python3", "-", "-m", "sglang.launch_server"], PYTHON),
        (["python3", "-m", "sglang.launch_server_old"], PYTHON),
        (["python3", "-m", "pdb", "-m", "sglang.launch_server"], PYTHON),
        (["python3", "-m"], PYTHON),
        (["python3"], PYTHON),
        (["python3", "-W", "-m", "sglang.launch_server"], PYTHON),
        # The kernel knows what it runs, whatever it calls itself.
        (["python3", "-m", "sglang.launch_server"], "/usr/bin/vim"),
        ([], PYTHON),
    ],
)
def test_a_command_line_that_holds_the_name_is_not_the_program(tree: ProcTree, argv: list[str], exe: str) -> None:
    process = made(tree, argv=argv, exe=exe)
    assert not hits(LAUNCHER, process)
    assert first_match(parse_match(DEFAULT_MATCH), process) is None


def test_an_interpreter_by_another_name_is_one(tree: ProcTree) -> None:
    assert hits(LAUNCHER, made(tree, argv=["llm-server", "-m", "sglang.launch_server"], exe=PYTHON + " (deleted)"))


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["python3", "/opt/venv/bin/sglang", "serve", "--model", "x"], True),
        (["python3", "-u", "sglang", "serve"], True),
        (["python3", "/opt/venv/bin/sglang", "generate"], False),
        (["python3", "/opt/venv/bin/sglang"], False),
        (["python3", "/opt/venv/bin/sglang-router", "serve"], False),
        (["python3", "other.py", "sglang", "serve"], False),
    ],
)
def test_a_script_is_its_base_name_and_the_arguments_that_follow(
    tree: ProcTree, argv: list[str], expected: bool
) -> None:
    assert hits({"script": "sglang", "args": ["serve"]}, made(tree, argv=argv, exe=PYTHON)) is expected


def test_a_script_with_a_path_is_that_path(tree: ProcTree) -> None:
    process = made(tree, argv=["python3", "/opt/a/sglang", "serve"], exe=PYTHON)
    assert hits({"script": "/opt/a/sglang"}, process)
    assert not hits({"script": "/opt/b/sglang"}, process)


def test_an_executable_is_its_whole_path(tree: ProcTree) -> None:
    process = made(tree, comm="server", argv=["anything"], exe="/opt/x/server (deleted)")
    assert hits({"exe": "/opt/x/server"}, process)
    assert not hits({"exe": "/opt/x/serve"}, process)
    assert not hits({"exe": "/usr/bin/server"}, process)


@pytest.mark.parametrize(
    ("comm", "argv", "expected"),
    [
        ("python3", ["sglang::scheduler"], True),
        ("sglang::schedul", ["sglang::scheduler_TP0"], True),
        ("python3", ["sglang::scheduler_DP1_PP0_TP3_EP2"], True),
        ("python3", ["sglang::scheduler_TP"], False),
        ("python3", ["sglang::scheduler_XX1"], False),
        ("python3", ["sglang::scheduler2"], False),
        ("python3", ["my sglang::scheduler"], False),
        ("python3", ["sglang::scheduler", "--more"], True),
        # A leader that has exited, and a name set by prctl: only the cut name is left.
        ("sglang::schedul", [], True),
        ("sglang::schedul", ["python3", "x.py"], True),
        ("sglang::detoken", [], False),
        # The whole name is known and is another one.
        ("sglang::schedul", ["./sglang::scheduler-report.sh"], False),
        ("sglang::schedul", ["/bin/sh", "/opt/sglang::scheduled.sh"], False),
    ],
)
def test_a_title_is_whole(tree: ProcTree, comm: str, argv: list[str], expected: bool) -> None:
    assert hits("sglang::scheduler", made(tree, comm=comm, argv=argv)) is expected


@pytest.mark.parametrize(
    ("comm", "expected"),
    [("sglang::router", True), ("sglang::router_", True), ("sglang::router_T", True), ("sglang::routers", False)],
)
def test_a_short_title_with_a_cut_chain(tree: ProcTree, comm: str, expected: bool) -> None:
    assert hits("sglang::router", made(tree, comm=comm, argv=[])) is expected


def test_a_title_with_a_pid(tree: ProcTree) -> None:
    assert hits("sglang::tokenizer_worker:<pid>", made(tree, argv=["sglang::tokenizer_worker:4711"]))
    tree.end(900)
    assert not hits("sglang::tokenizer_worker:<pid>", made(tree, argv=["sglang::tokenizer_worker:x"]))


def test_a_kernel_thread_is_no_program(tree: ProcTree) -> None:
    assert not hits("sglang::scheduler", made(tree, comm="sglang::schedul", argv=[], flags=0x00200000))


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["/opt/venv/bin/python3", "-m", "sglang.launch_server"], "{module: sglang.launch_server}"),
        (["python3", "/opt/venv/bin/sglang", "serve"], "{script: sglang, args: serve}"),
        (["sglang::scheduler_TP7"], "{title: sglang::scheduler}"),
        (["sglang::detokenizer"], "{title: sglang::detokenizer}"),
        (["sglang::data_parallel_controller"], "{title: sglang::data_parallel_controller}"),
        (["sglang::detokenizer_router"], "{title: sglang::detokenizer_router}"),
        (["sglang::tokenizer_worker:17"], "{title: sglang::tokenizer_worker:<pid>}"),
        (["sglang::router"], "{title: sglang::router}"),
        (["sglang::server"], "{title: sglang::server}"),
    ],
)
def test_the_default_knows_every_process_of_sglang(tree: ProcTree, argv: list[str], name: str) -> None:
    assert str(first_match(parse_match(DEFAULT_MATCH), made(tree, argv=argv))) == name


@pytest.mark.parametrize(
    "entry",
    [
        "",
        " ",
        "*",
        ".*",
        "sglang*",
        "[a-z]",
        "/",
        "::",
        "1",
        "4711",
        "python3",
        "bash",
        "systemd",
        "sshd",
        {"title": "python3.12"},
        {"exe": "/usr/bin/python3"},
        {"exe": "/opt/venv/bin/python"},
        {"exe": "/bin/sh"},
        {"exe": "/usr/bin/env"},
        {"exe": "/usr/bin/perl5.36"},
        {"exe": "sglang"},
        {"exe": "/sbin/init"},
        {"exe": ""},
        {"module": ""},
        {"module": "*"},
        {"module": "sglang launch"},
        {"module": "sglang."},
        {"script": "*"},
        {"script": ""},
        {"title": "x", "module": "y"},
        {"titel": "sglang::scheduler"},
        {},
        {"args": ["serve"]},
        {"title": "sglang::scheduler", "args": ["x"]},
        {"module": "sglang.launch_server", "args": "serve"},
        {"title": 7},
        7,
        None,
        ["sglang"],
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(entry: Any) -> None:
    with pytest.raises(CleanslateError) as caught:
        parse_match([entry])
    assert caught.value.message.startswith("match: ")
    assert caught.value.details["option"] == "match"
    assert caught.value.message.endswith(".")


def test_a_link_to_an_interpreter_is_one(tmp_path: Path) -> None:
    link = tmp_path / "server"
    link.symlink_to("/usr/bin/python3")
    with pytest.raises(CleanslateError, match="interpreter"):
        parse_match([{"exe": str(link)}])


WORDS = some.text(some.characters(exclude_characters="\0"), max_size=30).map(
    lambda text: text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogateescape")
)


class Written:
    """A process that is just its words."""

    kernel_thread = False

    def __init__(self, comm: str, argv: list[str], exe: str | None) -> None:
        self.comm, self.argv, self.exe = comm, argv, exe


@given(
    comm=WORDS.map(lambda text: text[:15]),
    argv=some.lists(
        some.one_of(
            WORDS, some.sampled_from(["-m", "sglang.launch_server", "-c", "-", "--", "sglang", "serve", "python3"])
        )
    ),
    exe=some.one_of(some.none(), WORDS, some.just(PYTHON)),
)
def test_no_words_break_it_and_only_whole_names_match(comm: str, argv: list[str], exe: str | None) -> None:
    process: Any = Written(comm, argv, exe)
    python_call(process)
    found = first_match(parse_match(DEFAULT_MATCH), process)
    if found is not None and found.kind == "module":
        assert "sglang.launch_server" in argv or "-msglang.launch_server" in "".join(argv)
    if found is not None and found.kind == "title":
        assert comm.startswith("sglang") or argv[0].strip().startswith("sglang")


@given(
    entry=some.one_of(WORDS, some.dictionaries(some.sampled_from(["module", "script", "exe", "title", "args"]), WORDS))
)
def test_every_text_is_a_pattern_or_an_error(entry: Any) -> None:
    try:
        patterns = parse_match([entry])
    except CleanslateError as error:
        assert error.message.isprintable()
    else:
        assert str(patterns[0]).isprintable()
