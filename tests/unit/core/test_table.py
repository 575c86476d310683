# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""/proc is read as the kernel means it, whatever processes call themselves."""

from __future__ import annotations

import errno
import functools
import importlib
import os
import resource
import sys
import typing as t
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.proc.table import (
    Hidden,
    Process,
    ProcFS,
    Vanished,
    ancestors,
    descendants,
    unescape_mount,
)

if t.TYPE_CHECKING:
    from .conftest import Children, Tree

WORDS = st.lists(st.binary(max_size=12).map(lambda raw: raw.replace(b"\0", b"")), max_size=6)


@pytest.fixture(scope="module", autouse=True)
def one(tmp_path_factory: pytest.TempPathFactory) -> None:
    One.root = tmp_path_factory.mktemp("one")
    (One.root / "4242").mkdir()


class One:
    root: Path

    def __new__(cls, **files: bytes) -> Process:  # type: ignore[misc]
        """The process whose files hold these bytes; it has no others."""
        folder = cls.root / "4242"
        for path in folder.iterdir():
            path.unlink()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        return ProcFS(str(cls.root)).process(4242)


def stat_line(comm: bytes, numbers: list[int]) -> bytes:
    ppid, pgrp, session, flags, threads, start_time = numbers
    fields = [b"S", *(b"%d" % n for n in (ppid, pgrp, session, 0, -1, flags)), *[b"7"] * 10, b"%d" % threads, b"0"]
    return b"4242 (%s) %s %d %s\n" % (comm, b" ".join(fields), start_time, b" ".join([b"18446744073709551615"] * 30))


@given(
    st.binary(max_size=64).map(lambda raw: raw.replace(b"\0", b"")),
    st.lists(st.integers(0, 2**31 - 1), min_size=5, max_size=5),
    st.integers(0, 2**63),
)
@example(b"a) R 1 (b", [1, 2, 3, 4, 5], 6)
@example(b")\n9 (x) Z 1 1", [1, 2, 3, 0x00200000, 5], 6)
@example(b"\xff\xfe((", [1, 2, 3, 4, 5], 6)
def test_no_name_of_a_process_moves_its_fields(comm: bytes, numbers: list[int], start_time: int) -> None:
    process = One(stat=stat_line(comm, [*numbers, start_time]))
    assert process.comm.encode("utf-8", "surrogateescape") == comm
    assert [process.ppid, process.pgrp, process.session] == numbers[:3]
    assert process.kernel_thread == bool(numbers[3] & 0x00200000)
    assert (process.threads, process.start_time, process.state) == (numbers[4], start_time, "S")


@given(st.integers(0, 200))
def test_a_cut_line_is_a_process_that_vanished(length: int) -> None:
    whole = stat_line(b"x", [1, 2, 3, 4, 5, 666])
    cut = whole[: min(length, whole.index(b"666"))]
    with pytest.raises(Vanished):
        _ = One(stat=cut)


@given(st.binary(max_size=80))
def test_garbage_is_a_process_that_vanished_or_has_numbers(raw: bytes) -> None:
    try:
        assert One(stat=raw).start_time is not None
    except Vanished:
        pass


@given(WORDS)
@example([b"", b"x"])
@example([b"x", b"", b""])
@example([b"\xff\n"])
def test_command_lines(words: list[bytes]) -> None:
    raw = b"".join(word + b"\0" for word in words)
    argv = One(stat=stat_line(b"x", [1] * 6), cmdline=raw).argv
    while words and not words[-1]:
        words = words[:-1]
    assert [word.encode("utf-8", "surrogateescape") for word in argv] == words


@pytest.mark.parametrize(
    ("cmdline", "title"),
    [
        (b"sglang::scheduler_TP0\0", "sglang::scheduler_TP0"),
        (b"sglang::scheduler_TP0" + b"\0" * 900, "sglang::scheduler_TP0"),
        (b"sglang::scheduler_TP0   \0\0", "sglang::scheduler_TP0"),
        (b"sglang::scheduler_TP0", "sglang::scheduler_TP0"),
        (b"python3\0-m\0sglang.launch_server\0", "python3"),
        (b"\0\0\0", "comm"),
        (b"", "comm"),
        (b"\0x\0", "comm"),
        (b"  \0x\0", "comm"),
    ],
)
def test_titles(cmdline: bytes, title: str) -> None:
    assert One(stat=stat_line(b"comm", [1] * 6), cmdline=cmdline).title == title


@given(WORDS)
def test_environments(words: list[bytes]) -> None:
    environ = One(stat=stat_line(b"x", [1] * 6), environ=b"\0".join(words)).environ
    expected: dict[bytes, bytes] = {}
    for word in words:
        name, equals, value = word.partition(b"=")
        if equals and name:
            expected.setdefault(name, value)
    assert environ is not None
    assert {k.encode("utf-8", "surrogateescape"): v.encode("utf-8", "surrogateescape") for k, v in environ.items()} == (
        expected
    )


def test_of_two_variables_of_one_name_the_first_counts_as_for_getenv() -> None:
    process = One(stat=stat_line(b"x", [1] * 6), environ=b"A=1\0\0\0rest of a title\0A=2\0B=x=y\0=z\0")
    assert process.environ == {"A": "1", "B": "x=y"}


def test_what_may_not_be_read_is_unknown_and_not_empty() -> None:
    process = One(stat=stat_line(b"x", [1] * 6))
    assert (process.environ, process.exe, process.uid, process.pid_namespace) == (None, None, None, None)
    assert (process.argv, process.cgroup, process.nspid) == ([], "", [4242])


V1 = "12:pids:/system.slice/x.service\n4:cpu,cpuacct:/a\n1:name=systemd:/system.slice/x.service\n"


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("0::/system.slice/x.service\n", "/system.slice/x.service"),
        ("0::/\n", "/"),
        ("", ""),
        (V1, "/system.slice/x.service"),
        (V1 + "0::/\n", "/system.slice/x.service"),
        (V1 + "0::/system.slice/y.service\n", "/system.slice/y.service"),
        ("3:memory:/process_api/1\n1:name=systemd:/\n0::/\n", "/"),
        ("0::/a:b/c::d\n", "/a:b/c::d"),
        ("0::/../../lxc/129\n", "/../../lxc/129"),
        ("5:devices:/docker/abc\n", ""),
    ],
)
def test_cgroups_of_version_1_and_2_and_both(text: str, path: str) -> None:
    assert One(stat=stat_line(b"x", [1] * 6), cgroup=text.encode()).cgroup == path


@given(st.binary(max_size=80))
def test_no_text_of_the_kernel_breaks_the_readers(raw: bytes) -> None:
    process = One(stat=stat_line(b"x", [1] * 6), cgroup=raw, cmdline=raw, environ=raw)
    assert isinstance(process.cgroup, str)
    assert isinstance(process.title, str)
    assert isinstance(process.environ, dict)


def test_a_dead_main_thread_is_read_through_a_living_one(tree: Tree) -> None:
    process = tree.add(
        70,
        thread=71,
        cmdline=b"sglang::scheduler\0",
        environ=b"A=1\0",
        cgroup="1:name=systemd:/system.slice/x.service\n",
    )
    assert not process.zombie
    assert process.title == "sglang::scheduler"
    assert process.environ == {"A": "1"}
    assert process.cgroup == "/system.slice/x.service"


def test_a_plain_zombie_is_dead(tree: Tree) -> None:
    assert tree.add(70, state="Z").zombie
    assert tree.add(71, state="X", threads=0).zombie
    assert not tree.add(72, state="D").zombie


def test_the_program_of_a_process_is_known_after_its_upgrade(tree: Tree) -> None:
    process = tree.add(70)
    os.symlink("/usr/bin/python3.12 (deleted)", tree.root / "70/exe")
    assert process.exe == "/usr/bin/python3.12"


def test_users_and_namespaces(tree: Tree) -> None:
    process = tree.add(70, nspid="70\t12\t3")
    assert (process.uid, process.nspid) == (1000, [70, 12, 3])


def test_a_table_holds_what_is_there(tree: Tree) -> None:
    for pid in (1, 30, 4):
        tree.add(pid)
    for name in ("self", "sys", "²", "12x"):
        (tree.root / name).mkdir(exist_ok=True)
    (tree.root / "99").mkdir()  # ended before its stat was read
    assert tree.fs.pids() == [1, 4, 30, 99]
    assert sorted(tree.fs.processes()) == [1, 4, 30]


@pytest.fixture
def deny(monkeypatch: pytest.MonkeyPatch) -> t.Callable[[int], None]:
    """Let the kernel refuse to open the stat of process 7."""

    def with_error(number: int) -> None:
        def refuse(real: t.Callable[..., t.Any], path: t.Any, *args: t.Any, **kwargs: t.Any) -> t.Any:
            if str(path).endswith("/7/stat"):
                raise OSError(number, os.strerror(number))
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, "open", functools.partial(refuse, os.open))
        monkeypatch.setattr("builtins.open", functools.partial(refuse, open))

    return with_error


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_a_hidden_process_is_not_taken_for_one_that_ended(
    tree: Tree, deny: t.Callable[[int], None], number: int
) -> None:
    tree.add(7)
    deny(number)
    with pytest.raises(Hidden):
        tree.fs.process(7)
    with pytest.raises(Hidden):
        tree.fs.find(7)


def test_a_process_that_ends_under_the_reader_has_vanished(tree: Tree, deny: t.Callable[[int], None]) -> None:
    tree.add(7)
    deny(errno.ESRCH)
    with pytest.raises(Vanished) as error:
        tree.fs.process(7)
    assert not isinstance(error.value, Hidden)
    assert tree.fs.find(7) is None
    assert tree.fs.processes() == {}


def test_own_need_is_an_error_and_no_empty_machine(tree: Tree, deny: t.Callable[[int], None]) -> None:
    tree.add(7)
    deny(errno.EIO)
    with pytest.raises(CleanslateError, match="7/stat"):
        tree.fs.processes()
    with pytest.raises(CleanslateError, match="nonexistent"):
        ProcFS("/nonexistent").pids()


def test_without_descriptors_nothing_is_said_of_others(tree: Tree) -> None:
    process = tree.add(7, environ=b"A=1\0")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))
    try:
        with pytest.raises(CleanslateError, match="Too many open files"):
            _ = process.environ
        with pytest.raises(CleanslateError, match="Too many open files"):
            tree.fs.process(7)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert process.environ == {"A": "1"}


def test_relatives(tree: Tree) -> None:
    for pid, ppid in ((1, 0), (2, 1), (3, 2), (4, 3), (5, 2), (6, 1)):
        tree.add(pid, ppid=ppid)
    table = tree.fs.processes()
    assert ancestors(table, 4) == [3, 2, 1]
    assert ancestors(table, 99) == []
    assert descendants(table, [2]) == {3, 4, 5}
    assert descendants(table, [2, 3]) == {4, 5}
    assert descendants(table, [99]) == set()


def test_a_pid_that_passed_on_while_the_table_was_read_has_no_elder_children(tree: Tree) -> None:
    tree.add(10, start_time=5000)  # got the pid of a parent that ended a moment ago
    tree.add(11, ppid=10, start_time=4000)
    tree.add(12, ppid=11, start_time=4100)
    tree.add(13, ppid=10, start_time=5000)
    assert descendants(tree.fs.processes(), [10]) == {13}


def test_a_table_with_a_circle_ends(tree: Tree) -> None:
    tree.add(10, ppid=11)
    tree.add(11, ppid=10)
    table = tree.fs.processes()
    assert set(ancestors(table, 10)) <= {10, 11}
    assert descendants(table, [10]) == {11}


def test_escapes_of_mount_tables() -> None:
    assert unescape_mount(r"/a\040b\011c\012d\134e") == "/a b\tc\nd\\e"


# -- the kernel's own /proc ---------------------------------------------------------------------------------------


def test_a_real_process_with_a_hostile_name(children: Children) -> None:
    name = b") Z 1 (\n\xff"
    code = f"import ctypes, sys; ctypes.CDLL(None).prctl(15, {name!r}); print('go', flush=True); sys.stdin.read()"
    child = children.ready(code, "a\nb", "", "", env={"CORE_TEST": "x=\xffy"})
    process = ProcFS().process(child.pid)
    assert process.comm.encode("utf-8", "surrogateescape") == name
    assert process.ppid == os.getpid()
    assert process.argv[0] == sys.executable
    assert process.argv[-1] == "a\nb"
    assert process.environ is not None
    assert process.environ["CORE_TEST"] == "x=\xffy"
    assert process.uid == os.getuid()
    assert process.exe is not None
    assert os.path.samefile(process.exe, sys.executable)
    assert process.nspid[0] == child.pid
    assert process.status["Uid"].split()[0] == str(os.getuid())


def test_a_real_title(children: Children) -> None:
    assert importlib.util.find_spec("setproctitle")
    code = "import setproctitle, sys; setproctitle.setproctitle('sglang::scheduler_TP3'); print(flush=True); input()"
    packages = os.path.dirname(importlib.import_module("setproctitle").__path__[0])
    child = children.ready(
        "import sys; sys.path.append(sys.argv[1]);" + code,
        packages,
        "padding" * 50,
        env={"SPT_NOENV": "1", "MARK": "m"},
    )
    process = ProcFS().process(child.pid)
    assert process.title == "sglang::scheduler_TP3"
    assert process.comm == "sglang::schedul"
    assert process.environ is not None
    assert process.environ["MARK"] == "m"


LEADER_GONE = """
import ctypes, os, platform, threading
threading.Thread(target=threading.Event().wait).start()
print("go", flush=True)
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""


def test_a_real_process_whose_main_thread_is_gone(children: Children) -> None:
    child = children.ready(LEADER_GONE, "some-argument", env={"MARK": "m"})
    fs = ProcFS()
    process = fs.process(child.pid)
    while process.state != "Z":
        process = fs.process(child.pid)
    assert Path(f"/proc/{child.pid}/cmdline").read_bytes() == b""
    assert (process.threads, process.zombie) == (2, False)
    assert process.argv[-1] == "some-argument"
    assert process.environ is not None
    assert process.environ["MARK"] == "m"
    assert process.exe is not None
    assert os.path.samefile(process.exe, sys.executable)
    assert process.pid_namespace == os.readlink("/proc/self/ns/pid")


def test_what_the_kernel_says_of_itself() -> None:
    fs = ProcFS()
    assert len(fs.boot_id()) == 36
    assert 0 <= fs.namespace_started() <= fs.process(os.getpid()).start_time
    assert fs.find(os.getpid()) is not None
    assert ProcFS("/nonexistent").boot_id() == ""
