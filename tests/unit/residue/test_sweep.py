# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is swept from folders of the test's own, and what stays."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.proc.scan import ScanResult, Unreadable
from ansible_collections.cleanslate.inference.plugins.module_utils.proc.table import ProcFS
from ansible_collections.cleanslate.inference.plugins.module_utils.residue import sweep as module
from ansible_collections.cleanslate.inference.plugins.module_utils.residue.names import SHM, TMP, kinds_of
from ansible_collections.cleanslate.inference.plugins.module_utils.residue.run import sweep_residue
from ansible_collections.cleanslate.inference.plugins.module_utils.residue.sweep import SweepOptions, Swept, sweep

DEAD = 4194303  # the highest pid that a 64-bit kernel may give out; not in use here, as the fixture checks

HOLD = """
import fcntl, mmap, os, sys
how, path = sys.argv[1:]
fd = os.open(path, os.O_RDWR)
if how == "mapped":
    kept = mmap.mmap(fd, 4096)
    os.close(fd)
if how == "locked":
    fcntl.flock(fd, fcntl.LOCK_EX)
print("ready", flush=True)
sys.stdin.read()
"""


class Place:
    def __init__(self, folder: Path) -> None:
        assert not os.path.exists("/proc/%d" % DEAD)
        self.shm = folder / "shm"
        self.tmp = folder / "tmp"
        self.shm.mkdir()
        self.tmp.mkdir()
        self.children: list[subprocess.Popen[bytes]] = []

    def file(self, name: str, size: int = 4096, age: float = 3600.0, folder: Path | None = None) -> Path:
        path = (folder or self.shm) / name
        path.write_bytes(b"x" * size)
        self.age(path, age)
        return path

    def age(self, path: Path, seconds: float) -> None:
        moment = time.time() - seconds
        os.utime(path, (moment, moment), follow_symlinks=False)

    def stale_socket(self, name: str, age: float = 3600.0) -> Path:
        path = self.tmp / name
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            server.listen()
        self.age(path, age)
        return path

    def hold(self, how: str, path: Path) -> int:
        child = subprocess.Popen(
            [sys.executable, "-c", HOLD, how, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        return child.pid

    def close(self) -> None:
        for child in self.children:
            child.communicate(b"")

    @property
    def pids(self) -> list[int]:
        return [os.getpid(), *(child.pid for child in self.children)]

    def sweep(self, check: bool = False, **options: Any) -> Swept:
        made = SweepOptions(shm_dir=str(self.shm), tmp_dir=str(self.tmp), **options)
        return sweep(made, check, ProcFS(), self.pids)

    def names(self) -> set[str]:
        return {path.name for path in [*self.shm.iterdir(), *self.tmp.iterdir()]}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    try:
        yield made
    finally:
        made.close()


def removed(swept: Swept) -> set[str]:
    return {os.path.basename(row["path"]) for row in swept.removed}


def kept(swept: Swept) -> dict[str, str]:
    return {os.path.basename(row["path"]): row["reason"] for row in swept.kept}


def test_the_dead_go_and_the_living_stay(place: Place) -> None:
    dead = place.file("sgl_shm_mm_%d_aa" % DEAD, 9 * 1024 * 1024)
    place.file("sgl_shm_mq_%d_bb" % os.getpid())
    mapped = place.file("nccl-AbC123")
    place.hold("mapped", mapped)
    place.file("nccl-XyZ987")
    place.file("psm_11112222")
    locked = place.file("sglang_loads_x.shm")
    place.hold("locked", locked)
    place.file("sglang_download_lock_1")
    place.file("user-data.bin")
    (place.shm / "nccl-evil12").symlink_to("/etc/passwd")
    place.stale_socket("tmpabcd1234")
    live = socket.socket(socket.AF_UNIX)
    live.bind(str(place.tmp / "tmpefgh5678"))
    live.listen()
    place.age(place.tmp / "tmpefgh5678", 3600)
    place.file("tmpijkl9012", 0, folder=place.tmp)
    (place.tmp / ".X11-unix").mkdir()
    before = place.names()
    storage = dead.stat().st_blocks * 512

    planned = place.sweep(check=True)
    assert place.names() == before

    done = place.sweep()
    expected = {"sgl_shm_mm_%d_aa" % DEAD, "nccl-XyZ987", "tmpabcd1234"}
    assert removed(planned) == removed(done) == expected
    assert place.names() == before - expected
    assert done.freed == planned.freed >= storage >= 9 * 1024 * 1024
    assert (
        kept(done)
        == kept(planned)
        == {
            "sgl_shm_mq_%d_bb" % os.getpid(): "process_alive",
            "nccl-AbC123": "in_use",
            "psm_11112222": "unattributable",
            "sglang_loads_x.shm": "locked",
            "sglang_download_lock_1": "not_listed",
            "nccl-evil12": "wrong_type",
            "tmpefgh5678": "in_use",
            "tmpijkl9012": "unattributable",
        }
    )

    again = place.sweep()
    assert (again.removed, again.freed) == ([], 0)

    asked = place.sweep(unattributable=True)
    assert removed(asked) == {"psm_11112222", "tmpijkl9012"}
    live.close()


def test_one_unreadable_process_and_nothing_goes(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    path = place.file("nccl-XyZ987")

    def blind(*_args: Any, **_seams: Any) -> ScanResult:
        return ScanResult(unreadable=[Unreadable(77, "hidden", "its descriptors may not be listed")])

    monkeypatch.setattr(module, "scan", blind)
    swept = place.sweep()
    assert path.exists()
    assert (swept.removed, kept(swept)) == ([], {"nccl-XyZ987": "scan_incomplete"})
    assert "77 (hidden)" in swept.kept[0]["detail"]
    assert swept.warnings
    # In a simulation it is listed and does not count, in the test's own folders.
    assert removed(place.sweep(simulated=True)) == {"nccl-XyZ987"}


@pytest.mark.parametrize("how", ["opened", "mapped", "locked"])
def test_use_out_of_sight_is_seen_by_the_kernel(place: Place, how: str) -> None:
    path = place.file("nccl-XyZ987")
    place.hold(how, path)
    made = SweepOptions(shm_dir=str(place.shm), tmp_dir=str(place.tmp))
    swept = sweep(made, False, ProcFS(), [os.getpid()])
    assert path.exists()
    assert kept(swept) == {"nccl-XyZ987": "locked" if how == "locked" else "in_use"}


def test_use_by_this_very_process_counts(place: Place) -> None:
    path = place.file("nccl-XyZ987")
    with open(path, "r+b") as handle:
        segment = mmap.mmap(handle.fileno(), 4096)
    with segment:
        assert kept(place.sweep()) == {"nccl-XyZ987": "in_use"}
    assert removed(place.sweep()) == {"nccl-XyZ987"}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.symlink_to("/etc/passwd"), "wrong_type"),
        (lambda path: path.symlink_to("nowhere"), "wrong_type"),
        (lambda path: path.mkdir(), "wrong_type"),
        (os.mkfifo, "wrong_type"),
        (lambda path: socket.socket(socket.AF_UNIX).bind(str(path)), "wrong_type"),
    ],
    ids=["symlink", "dangling", "folder", "fifo", "socket"],
)
def test_what_was_planted_stays(place: Place, make: Callable[[Path], None], reason: str) -> None:
    path = place.shm / "nccl-evil12"
    make(path)
    swept = place.sweep(min_age=0)
    assert kept(swept) == {"nccl-evil12": reason}
    assert os.path.lexists(path)


def test_a_second_name_keeps_a_file(place: Place) -> None:
    os.link(place.file("precious", folder=place.tmp), place.shm / "nccl-evil12")
    assert kept(place.sweep()) == {"nccl-evil12": "hard_link"}


def test_a_symlink_that_appears_between_look_and_removal_is_not_followed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = place.file("nccl-XyZ987")
    precious = place.file("precious", folder=place.tmp)
    unused = module._Sweeper.unused

    def swap(self: Any, candidates: Any) -> Any:
        free = unused(self, candidates)
        if not path.is_symlink():
            path.unlink()
            path.symlink_to(precious)
        return free

    monkeypatch.setattr(module._Sweeper, "unused", swap)
    swept = place.sweep()
    assert swept.removed == []
    assert precious.exists()
    assert path.is_symlink()


def test_another_file_of_the_same_name_is_not_the_judged_one(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    path = place.file("nccl-XyZ987")
    unlink = module._Sweeper.unlink

    def swap(self: Any, candidate: Any, check: bool) -> None:
        os.rename(path, place.tmp / "moved")
        place.file("nccl-XyZ987")
        unlink(self, candidate, check)

    monkeypatch.setattr(module._Sweeper, "unlink", swap)
    assert kept(place.sweep()) == {"nccl-XyZ987": "changed"}
    assert path.exists()


def test_age(place: Place) -> None:
    place.file("nccl-XyZ987", age=5)
    place.file("sgl_shm_mq_%d_aa" % DEAD, age=5)
    first = place.sweep(check=True)
    assert (removed(first), kept(first)) == ({"sgl_shm_mq_%d_aa" % DEAD}, {"nccl-XyZ987": "too_young"})
    assert removed(place.sweep(check=True, min_age=3)) == {"nccl-XyZ987", "sgl_shm_mq_%d_aa" % DEAD}
    assert removed(place.sweep(check=True, min_age=100)) == set()


def test_a_file_of_the_future_is_young(place: Place) -> None:
    place.file("nccl-XyZ987", age=-500)
    assert kept(place.sweep()) == {"nccl-XyZ987": "too_young"}


def test_only_empty_temporary_files_are_residue(place: Place) -> None:
    place.file("tmpabcd1234", 3, folder=place.tmp)
    assert kept(place.sweep(unattributable=True)) == {"tmpabcd1234": "not_empty"}


def test_owners(place: Place) -> None:
    place.file("nccl-XyZ987")
    assert kept(place.sweep(uids=frozenset([os.geteuid() + 1]))) == {"nccl-XyZ987": "foreign_owner"}
    assert removed(place.sweep(uids=frozenset([os.geteuid()]))) == {"nccl-XyZ987"}


def test_a_datagram_socket_and_one_that_is_only_bound_live(place: Place) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one, socket.socket(socket.AF_UNIX) as two:
        one.bind(str(place.tmp / "tmpdgram123"))
        two.bind(str(place.tmp / "tmpbound123"))
        assert set(kept(place.sweep(min_age=0)).values()) == {"in_use"}
    assert removed(place.sweep(min_age=0)) == {"tmpdgram123", "tmpbound123"}


def test_one_folder_for_both(place: Place) -> None:
    place.file("nccl-XyZ987", folder=place.tmp)
    place.stale_socket("tmpabcd1234")
    swept = sweep(SweepOptions(shm_dir=str(place.tmp), tmp_dir=str(place.tmp)), False, ProcFS(), place.pids)
    assert removed(swept) == {"nccl-XyZ987", "tmpabcd1234"}


def test_no_folder_no_residue(place: Place) -> None:
    swept = sweep(
        SweepOptions(shm_dir=str(place.shm / "no"), tmp_dir=str(place.tmp / "no")), False, ProcFS(), place.pids
    )
    assert (swept.removed, swept.kept) == ([], [])


def test_a_folder_where_anybody_may_rename_is_refused(place: Place) -> None:
    path = place.file("nccl-XyZ987")
    place.shm.chmod(0o777)
    with pytest.raises(CleanslateError, match="sticky") as caught:
        place.sweep()
    assert caught.value.details["option"] == "shm_dir"
    place.shm.chmod(0o1777)
    assert removed(place.sweep()) == {path.name}


def test_a_folder_of_somebody_else_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(place.shm, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(CleanslateError, match="belongs to"):
        place.sweep()


def test_a_shared_folder_needs_a_look_at_everybody(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    path = place.file("nccl-XyZ987")
    monkeypatch.setattr(module, "SYSTEM_FOLDERS", (str(place.shm),))
    swept = place.sweep(uids=frozenset([os.geteuid()]), simulated=True)
    assert kept(swept) == {"nccl-XyZ987": "scan_incomplete"}
    assert "users" in swept.kept[0]["detail"]
    assert path.exists()


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"shm_dir": "relative"}, "shm_dir"),
        ({"tmp_dir": "/"}, "tmp_dir"),
        ({"min_age": -1}, "min_age"),
        ({"min_age": float("nan")}, "min_age"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], option: str) -> None:
    with pytest.raises(CleanslateError) as caught:
        SweepOptions(**options).check()
    assert caught.value.details["option"] == option


def test_the_result_of_the_module(place: Place) -> None:
    place.file("nccl-XyZ987")
    params = {
        "shm_dir": str(place.shm),
        "tmp_dir": str(place.tmp),
        "run_dir": str(place.tmp / "run"),
        "dev_dir": str(place.tmp / "dev"),
    }
    planned = sweep_residue(params, True, ProcFS(), place.pids)
    assert not (place.tmp / "run").exists()
    done = sweep_residue(params, False, ProcFS(), place.pids)
    assert planned["changed"] is done["changed"] is done["simulated"] is True
    assert done["diff"]["before"] == str(place.shm / "nccl-XyZ987") + "\n"
    assert done["diff"]["after"] == ""
    assert sweep_residue(params, False, ProcFS(), place.pids)["changed"] is False


def test_a_reader_out_of_sight_is_not_disturbed_by_a_sweep_in_check_mode(place: Place) -> None:
    path = place.file("sglang_loads_x.shm")
    mode = stat.S_IMODE(path.stat().st_mode)
    place.sweep(check=True)
    with open(path, "rb") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("sgl_shm_mm_17_ab", True),
        ("sgl_shm_nodecheck_17_ab", True),
        ("sgl_shm_mm_017_ab", False),
        ("sgl_shm_mm__ab", False),
        ("multi_tokenizer_args_17", True),
        ("multi_tokenizer_args_17x", False),
        ("sglang_loads_abc.shm", True),
        ("sglang_host_pool_1.mmap", True),
        ("sglang_download_lock_1", False),
        ("nccl-AbC123", True),
        ("nccl-AbC1234", False),
        ("nccl-AbC12\n", False),
        ("xnccl-AbC123", False),
        ("cuda.shm.0.1a2b.1", True),
        ("torch_17_23_0", True),
        ("vllm_offload_x", True),
        ("psm_11112222", True),
        ("psm_1111222z", False),
        ("sem.mp-abcd1234", True),
        ("sem.loky-17-abcd", True),
        ("user-data.bin", False),
        (".X11-unix", False),
    ],
)
def test_names(name: str, known: bool) -> None:
    assert bool(kinds_of(name, SHM)) is known


@settings(max_examples=60, deadline=None)
@given(names=some.lists(some.binary(min_size=1, max_size=40).filter(lambda raw: b"/" not in raw and b"\0" not in raw)))
def test_hostile_names_are_kept_and_told_in_print(names: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Place(Path(folder))
        for raw in names:
            for prefix in (b"", b"nccl-", b"sgl_shm_mm_1_"):
                name = prefix + raw
                if name not in (b".", b".."):
                    with open(os.path.join(os.fsencode(place.shm), name), "wb"):
                        pass
        there = set(os.listdir(os.fsencode(place.shm)))
        swept = place.sweep(min_age=0)
        left = set(os.listdir(os.fsencode(place.shm)))
        assert len(there - left) == len(swept.removed)
        for raw in there - left:
            assert kinds_of(os.fsdecode(raw), SHM)
        assert all(row["path"].isprintable() for row in [*swept.removed, *swept.kept])


@given(some.text())
def test_no_name_is_in_a_family_with_a_slash_or_control_character(name: str) -> None:
    if kinds_of(name, (*SHM, *TMP)):
        assert name.isascii()
        assert name.isprintable()
        assert "/" not in name
