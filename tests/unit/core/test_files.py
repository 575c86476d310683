# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Files are the old or the new whole, locks die with their holder, and nobody else's folder is trusted."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import stat
import typing as t
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.state.files import (
    Locked,
    check_dir,
    ensure_dir,
    locked,
    make_dir,
    read_bytes,
    remove,
    write_atomic,
)

if t.TYPE_CHECKING:
    from .conftest import Children, FakeClock

Foreign = t.Callable[[Path], None]
ROOT = os.geteuid() == 0


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def umask() -> t.Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


# -- whole files --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("mode", [0o600, 0o644, 0o640, 0o755])
def test_a_file_gets_content_and_mode_whatever_the_umask(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "f"
    assert write_atomic(str(path), b"one", mode)
    assert (path.read_bytes(), mode_of(path)) == (b"one", mode)
    assert os.listdir(tmp_path) == ["f"]


def test_what_is_so_already_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_atomic(str(path), b"one", 0o600)
    before = path.stat()
    assert not write_atomic(str(path), b"one", 0o600)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert write_atomic(str(path), b"two", 0o600)
    assert write_atomic(str(path), b"two", 0o644)
    assert mode_of(path) == 0o644


def test_the_owner_is_part_of_what_a_file_shall_be(tmp_path: Path) -> None:
    path, uid, gid = tmp_path / "f", 65534 if ROOT else os.geteuid(), 65534 if ROOT else os.getegid()
    write_atomic(str(path), b"one", 0o600)
    assert write_atomic(str(path), b"one", 0o600, uid, gid) == ROOT
    assert (path.stat().st_uid, path.stat().st_gid, mode_of(path)) == (uid, gid, 0o600)
    assert not write_atomic(str(path), b"one", 0o600, uid, gid)
    # Without an owner it is this user's: a file that another one could change is not what was asked for.
    assert write_atomic(str(path), b"one", 0o600) == ROOT
    assert path.stat().st_uid == os.geteuid()


def test_a_full_disk_leaves_the_old_file_and_no_rubbish(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_atomic(str(path), b"old", 0o600)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(CleanslateError, match=r"f cannot be written: File too large\."):
            write_atomic(str(path), b"x" * 100_000, 0o600)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f"]


def test_an_interrupted_write_leaves_the_old_file_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> t.NoReturn:
        raise KeyboardInterrupt

    path = tmp_path / "f"
    write_atomic(str(path), b"old", 0o600)
    monkeypatch.setattr(os, "rename", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(str(path), b"new", 0o600)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f"]


def test_a_planted_link_is_replaced_and_never_followed(tmp_path: Path) -> None:
    victim, soft, hard = tmp_path / "victim", tmp_path / "soft", tmp_path / "hard"
    victim.write_bytes(b"precious")
    soft.symlink_to(victim)
    hard.hardlink_to(victim)
    for path in (soft, hard):
        # Even if the content would be the same, the file must be ours alone.
        write_atomic(str(path), b"ours", 0o600)
        assert not path.is_symlink()
        assert path.read_bytes() == b"ours"
    assert victim.read_bytes() == b"precious"
    soft.unlink()
    # A link whose mode, size and content are all as wished.
    victim.write_text(str(victim))
    soft.symlink_to(victim)
    assert write_atomic(str(soft), str(victim).encode(), 0o777)
    assert not soft.is_symlink()


def test_what_is_no_plain_file_neither_blocks_nor_survives(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    with pytest.raises(CleanslateError, match="no plain file"):
        read_bytes(str(fifo))
    assert write_atomic(str(fifo), b"", 0o600)
    assert read_bytes(str(fifo)) == b""
    (tmp_path / "folder").mkdir(0o600)
    with pytest.raises(CleanslateError, match="folder cannot be written"):
        write_atomic(str(tmp_path / "folder"), b"", 0o600)
    with pytest.raises(CleanslateError, match="no plain file"):
        read_bytes(str(tmp_path / "folder"))
    assert sorted(os.listdir(tmp_path)) == ["fifo", "folder"]


def test_what_cannot_be_done_is_said_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CleanslateError, match="absent/f cannot be written: No such file"):
        write_atomic(str(tmp_path / "absent/f"), b"", 0o600)
    with pytest.raises(CleanslateError, match="file/f cannot be read: Not a directory"):
        read_bytes(str(tmp_path / "file/f"))
    with pytest.raises(CleanslateError, match="cannot be removed: Is a directory"):
        remove(str(tmp_path))
    assert read_bytes(str(tmp_path / "absent")) is None


def test_removing_a_link_spares_what_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    assert remove(str(tmp_path / "link"))
    assert not remove(str(tmp_path / "link"))
    assert os.listdir(tmp_path) == ["victim"]


def test_a_trusted_file_is_ours_and_no_link(tmp_path: Path, foreign: Foreign) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x")
    (tmp_path / "link").symlink_to(path)
    assert read_bytes(str(tmp_path / "link")) == b"x"
    with pytest.raises(CleanslateError, match="link is a symlink"):
        read_bytes(str(tmp_path / "link"), trusted=True)
    assert read_bytes(str(path), trusted=True) == b"x"
    foreign(path)
    with pytest.raises(CleanslateError, match=r"f belongs to user .*uid \d+.*Remove it"):
        read_bytes(str(path), trusted=True)


@given(st.binary(max_size=5000))
def test_content_comes_back_as_it_was(content: bytes) -> None:
    path = "/dev/shm/cleanslate-core-%d" % os.getpid()
    try:
        write_atomic(path, content, 0o600)
        assert read_bytes(path) == content
        assert not write_atomic(path, content, 0o600)
    finally:
        remove(path)


def test_a_reader_never_sees_a_half_file(tmp_path: Path, children: Children) -> None:
    path = tmp_path / "f"
    write_atomic(str(path), b"a" * 50_000, 0o600)
    writer = children.ready(
        "import sys\n"
        "from ansible_collections.cleanslate.inference.plugins.module_utils.state.files import write_atomic\n"
        "print(flush=True)\n"
        "while True:\n"
        "    for letter in (b'b', b'a'): write_atomic(sys.argv[1], letter * 50_000, 0o600)\n",
        str(path),
    )
    seen = set()
    while seen != {b"a", b"b"}:
        assert writer.poll() is None
        content = read_bytes(str(path))
        assert content is not None
        assert content in (b"a" * 50_000, b"b" * 50_000)
        seen.add(content[:1])


# -- folders ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("umask")
def test_folders_are_made_with_their_modes(tmp_path: Path) -> None:
    make_dir(str(tmp_path / "a/b/c") + "/", 0o700)
    assert [mode_of(tmp_path / path) for path in ("a", "a/b", "a/b/c")] == [0o755, 0o755, 0o700]
    (tmp_path / "a/b/c").chmod(0o750)
    make_dir(str(tmp_path / "a/b/c"), 0o700)
    assert mode_of(tmp_path / "a/b/c") == 0o750


def test_a_folder_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in ("file", "file/below", "link"):
        with pytest.raises(CleanslateError, match="cannot be created"):
            make_dir(str(tmp_path / path))


def test_ones_own_folder_is_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    assert not check_dir(str(folder), "run_dir")
    assert not check_dir(str(folder / "below"), "run_dir")
    ensure_dir(str(folder), "run_dir", 0o750)
    assert mode_of(folder) == 0o750
    (tmp_path / "link").symlink_to(folder)
    for path in (folder, tmp_path / "link", str(folder) + "/", "/"):
        assert check_dir(str(path), "run_dir")
    folder.chmod(0o1777)
    assert check_dir(str(folder), "run_dir")


def test_a_folder_of_another_user_is_refused(tmp_path: Path, foreign: Foreign) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    foreign(folder)
    for ask in (check_dir, ensure_dir):
        with pytest.raises(CleanslateError, match=r"state_dir: .*/d belongs to user .*uid \d+.*`chown") as error:
            ask(str(folder), "state_dir")
        assert str(os.geteuid()) in error.value.message


def test_a_link_of_another_user_is_refused(tmp_path: Path, foreign: Foreign) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "d")
    foreign(tmp_path / "link")
    with pytest.raises(CleanslateError, match=r"run_dir: .*/link is a symlink of user .*Remove it"):
        check_dir(str(tmp_path / "link"), "run_dir")


@pytest.mark.parametrize("mode", [0o777, 0o757, *([0o775, 0o770] if ROOT else [])])
def test_a_folder_that_others_may_change_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(CleanslateError, match=rf"run_dir: .*mode {mode:04o}.*`chmod go-w .*/d`"):
        ensure_dir(str(folder), "run_dir")


def test_what_is_no_folder_is_refused_by_the_option_s_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for path, why in (("file", "no folder"), ("dangling", "No such file"), ("file/d", "Not a directory")):
        with pytest.raises(CleanslateError, match="run_dir: .*" + why):
            ensure_dir(str(tmp_path / path), "run_dir")
    with pytest.raises(CleanslateError, match="run_dir: relative/path is no absolute path"):
        check_dir("relative/path", "run_dir")


# -- locks --------------------------------------------------------------------------------------------------------

HOLD = """
import subprocess, sys
from ansible_collections.cleanslate.inference.plugins.module_utils.state.files import locked
with locked(sys.argv[1]):
    child = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
    input()
"""


def test_a_lock_keeps_others_out_and_goes_with_its_holder(tmp_path: Path, children: Children) -> None:
    path = str(tmp_path / "lock")
    holder = children.ready(HOLD, path)
    bystander = int(children.said)
    try:
        with pytest.raises(Locked), locked(path):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        # The program that it had started lives on, and does not have the lock.
        os.kill(bystander, 0)
        with locked(path):
            assert mode_of(tmp_path / "lock") == 0o600
    finally:
        os.kill(bystander, signal.SIGKILL)


FORK = """
import os, sys
from ansible_collections.cleanslate.inference.plugins.module_utils.state.files import locked
with locked(sys.argv[1]):
    if os.fork() == 0:
        sys.stdin.read()  # has the descriptor as long as it lives
        os._exit(0)
print("done", flush=True)
sys.stdin.read()
"""


def test_a_lock_is_free_again_at_once_though_a_fork_lives_on(tmp_path: Path, children: Children) -> None:
    path = str(tmp_path / "lock")
    children.ready(FORK, path)
    with locked(path):
        assert children.said == "done"


def test_a_lock_is_freed_by_an_error(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ZeroDivisionError), locked(path):
        raise ZeroDivisionError
    with locked(path):
        pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_who_waits_gets_the_lock_when_it_is_free(tmp_path: Path, clock: FakeClock) -> None:
    path = str(tmp_path / "lock")
    held = locked(path)
    held.__enter__()
    clock.on_pause = lambda: held.__exit__(None, None, None) if len(clock.pauses) == 3 else None
    with locked(path, 10.0, clock):
        assert len(clock.pauses) == 3


@pytest.mark.parametrize("timeout", [0.0, -1.0, 0.05, 2.0])
def test_who_waits_in_vain_gives_up_in_time(tmp_path: Path, clock: FakeClock, timeout: float) -> None:
    path = str(tmp_path / "lock")
    before = len(os.listdir("/proc/self/fd"))
    with locked(path):
        with pytest.raises(Locked), locked(path, timeout, clock):
            pass
        assert sum(clock.pauses) == pytest.approx(max(0.0, timeout), abs=0.02)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("made_anew", [False, True])
def test_a_lock_file_that_was_removed_meanwhile_locks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_anew: bool
) -> None:
    path = tmp_path / "lock"
    real, calls = fcntl.flock, []

    def flock(fd: int, operation: int) -> None:
        if not calls:
            path.unlink()
            if made_anew:
                path.write_bytes(b"")
        calls.append(operation)
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(str(path)):
        monkeypatch.undo()
        assert path.exists()
        with pytest.raises(Locked), locked(str(path)):
            pass
    assert len(calls) == 2


def test_what_is_planted_in_the_place_of_a_lock_is_refused(tmp_path: Path, foreign: Foreign) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name, why in (("link", "symlink"), ("fifo", "no plain file"), ("folder", "directory"), ("absent/x", "No such")):
        with pytest.raises(CleanslateError, match=f"{name} .*{why}"), locked(str(tmp_path / name)):
            pass
    assert not (tmp_path / "victim").exists()
    (tmp_path / "theirs").write_bytes(b"")
    foreign(tmp_path / "theirs")
    with pytest.raises(CleanslateError, match="theirs belongs to user"), locked(str(tmp_path / "theirs")):
        pass


def test_a_lock_of_another_process_does_not_block_for_ever(tmp_path: Path, children: Children) -> None:
    path = str(tmp_path / "lock")
    holder = children.ready(HOLD, path)
    try:
        with pytest.raises(Locked), locked(path, 0.15):
            pass
        holder.communicate("\n")
        with locked(path, 5.0):
            pass
    finally:
        os.kill(int(children.said), signal.SIGKILL)
