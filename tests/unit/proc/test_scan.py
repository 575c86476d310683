# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Parsers of /proc, and the scan of real processes that these tests start."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as some

from ansible_collections.cleanslate.inference.plugins.module_utils.proc import scan as scan_module
from ansible_collections.cleanslate.inference.plugins.module_utils.proc.kernel import Mappings, parse_maps
from ansible_collections.cleanslate.inference.plugins.module_utils.proc.mounts import parse_mounts
from ansible_collections.cleanslate.inference.plugins.module_utils.proc.scan import (
    ScanResult,
    Watch,
    key_for_path,
    scan,
)
from ansible_collections.cleanslate.inference.plugins.module_utils.proc.table import Process, ProcFS

from ..proctree import ProcTree

NODE = 4096
names = some.binary(min_size=0, max_size=15).filter(lambda raw: b"\0" not in raw)


@given(names, some.sampled_from("RSDZT"), some.integers(1, 2**22), some.integers(1, 2**60))
@example(b"a) b (c", "S", 7, 9)
@example(b") R 1 1 1", "S", 7, 9)
@example(b"\n\x1b[2J", "S", 7, 9)
def test_stat_is_read_after_the_last_parenthesis(name: bytes, state: str, ppid: int, start: int) -> None:
    fields = [state, ppid, 5, 6, 0, -1, 0x00200000, *[0] * 10, 3, 0, start, *[0] * 30]
    raw = b"42 (%s) %s\n" % (name, " ".join(str(field) for field in fields).encode())
    process = Process(ProcFS(), 42, raw)
    assert process.comm.encode("utf-8", "surrogateescape") == name
    assert (process.state, process.ppid, process.pgrp, process.session) == (state, ppid, 5, 6)
    assert (process.kernel_thread, process.threads, process.start_time) == (True, 3, start)


paths = some.binary(min_size=1, max_size=60).filter(
    lambda raw: b"\0" not in raw and b"\n" not in raw and b"\\" not in raw
)


@given(paths, some.booleans(), some.integers(1, 2**40))
def test_maps_gives_back_the_path_whatever_is_in_it(path: bytes, shared: bool, inode: int) -> None:
    line = b"7f0000000000-7f0000001000 rw-%s 00000000 fd:01 %d                    /%s\n"
    anonymous = (
        b"7f0000001000-7f0000002000 rw-p 00000000 00:00 0 \n7f0000002000-7f0000003000 r-xp 00000000 00:00 0  [vdso]\n"
    )
    (region,) = parse_maps(anonymous + line % (b"s" if shared else b"p", inode, path) + anonymous)
    assert region.path.encode("utf-8", "surrogateescape") == b"/" + path
    assert (region.device, region.inode) == (os.makedev(0xFD, 1), inode)
    assert len(parse_maps(line % (b"s" if shared else b"p", inode, path), shared_only=True)) == shared


@given(some.binary(max_size=300))
def test_no_text_breaks_the_parser_of_maps(raw: bytes) -> None:
    parse_maps(raw)


@given(some.lists(some.binary(max_size=30).filter(lambda raw: b"\0" not in raw), max_size=6))
def test_cmdline_gives_back_its_words(tmp_path_factory: pytest.TempPathFactory, words: list[bytes]) -> None:
    folder = tmp_path_factory.mktemp("proc")
    (folder / "7").mkdir()
    (folder / "7/stat").write_bytes(b"7 (x) S 1 7 7 0 -1 0 %s 1 0 5\n" % b" ".join([b"0"] * 10))
    (folder / "7/cmdline").write_bytes(b"".join(word + b"\0" for word in words))
    process = ProcFS(str(folder)).process(7)
    while words and not words[-1]:
        words.pop()
    assert [word.encode("utf-8", "surrogateescape") for word in process.argv] == words


class Held:
    """Files of the test's own that stand for nodes, and processes that hold them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def file(self, name: str) -> Path:
        path = self.folder / name
        path.write_bytes(b"\0" * NODE)
        return path

    def run(self, script: str, *arguments: object) -> int:
        """Start a process; returns its pid once it has said that it is ready."""
        words = [sys.executable, "-c", script, *(str(argument) for argument in arguments)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL)
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process.pid

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def look(self, *files: Path, pids: list[int] | None = None, private: bool = True) -> ScanResult:
        keys = {path.name: key_for_path(str(path)) for path in files}
        watched = {name: key for name, key in keys.items() if key is not None}
        mine = [process.pid for process in self.processes] if pids is None else pids
        return scan(ProcFS(), Watch(frozenset(watched.values()), watched, private), pids=mine)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    made = Held(tmp_path)
    yield made
    made.end()


OPEN = "import os, signal, sys; f = os.open(sys.argv[1], os.O_RDWR); print('ready', flush=True); signal.pause()"
MAP = """
import mmap, os, signal, sys
f = os.open(sys.argv[1], os.O_RDWR)
m = mmap.mmap(f, 4096, flags=getattr(mmap, sys.argv[2]))
os.closerange(3, 64)  # its own descriptor, and the copy that the mmap object keeps
print("ready", flush=True)
signal.pause()
"""
LEADERLESS = """
import ctypes, os, signal, sys, threading
f = os.open(sys.argv[1], os.O_RDWR)
threading.Thread(target=threading.Event().wait).start()
print("ready", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""
UNSHARED = """
import ctypes, os, signal, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
def hold():
    assert libc.unshare(0x400) == 0  # CLONE_FILES
    os.open(sys.argv[1], os.O_RDWR)
    print("ready", flush=True)
    signal.pause()
threading.Thread(target=hold).start()
threading.Event().wait()
"""


def test_open_files_are_found_by_what_they_are(held: Held) -> None:
    node, other = held.file("nvidia0"), held.file("other")
    link = held.folder / "link"
    os.link(node, link)
    first, second, third = held.run(OPEN, node), held.run(OPEN, link), held.run(OPEN, other)
    result = held.look(node)
    assert sorted(result.found) == sorted([first, second])
    assert third in result.table
    assert result.complete
    assert result.found[first].opened == {key_for_path(str(node))}
    assert result.found[first].mapped == frozenset()


def test_a_file_that_was_unlinked_is_still_held(held: Held) -> None:
    node = held.file("nvidia0")
    pid = held.run(OPEN, node)
    key = key_for_path(str(node))
    assert key is not None
    node.unlink()
    result = scan(ProcFS(), Watch(frozenset([key]), {}, True), pids=[pid])
    assert list(result.found) == [pid]


@pytest.mark.parametrize("kind", ["MAP_SHARED", "MAP_PRIVATE"])
@pytest.mark.parametrize("unlinked", [False, True])
def test_a_mapping_outlives_its_descriptor(held: Held, kind: str, unlinked: bool) -> None:
    node = held.file("nvidia0")
    pid = held.run(MAP, node, kind)
    key = key_for_path(str(node))
    assert key is not None
    if unlinked:
        node.unlink()
    result = scan(ProcFS(), Watch(frozenset([key]), {"nvidia0": key}, True), pids=[pid])
    assert result.found[pid].mapped == {key}
    assert result.found[pid].opened == frozenset()


def test_a_thread_holds_on_after_the_main_thread_has_ended(held: Held) -> None:
    node = held.file("nvidia0")
    pid = held.run(LEADERLESS, node)
    while ProcFS().process(pid).state != "Z":
        os.sched_yield()
    result = held.look(node)
    assert list(result.found) == [pid]
    assert result.found[pid].thread_only
    assert os.listdir("/proc/%d/fd" % pid) == []


def test_a_thread_may_have_descriptors_of_its_own(held: Held) -> None:
    node = held.file("nvidia0")
    pid = held.run(UNSHARED, node)
    assert str(node) not in [os.readlink("/proc/%d/fd/%s" % (pid, fd)) for fd in os.listdir("/proc/%d/fd" % pid)]
    assert list(held.look(node).found) == [pid]


def test_a_plain_zombie_holds_nothing(held: Held) -> None:
    node = held.file("nvidia0")
    pid = held.run(OPEN, node)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    result = held.look(node)
    assert (result.found, result.unreadable, result.processes) == ({}, [], 0)


def test_what_is_skipped_and_what_is_not_chosen_is_not_looked_at(held: Held) -> None:
    node = held.file("nvidia0")
    pid, other = held.run(OPEN, node), held.run(OPEN, node)
    keys = frozenset(key for key in [key_for_path(str(node))] if key)
    assert list(scan(ProcFS(), Watch(keys, {}, True), pids=[pid, other], skip=[pid]).found) == [other]
    assert list(scan(ProcFS(), Watch(keys, {}, True), pids=[pid]).table) == [pid]
    assert scan(ProcFS(), Watch(keys, {}, True), pids=[pid], uids=[os.getuid() + 1]).table == {}


def test_a_character_device_is_found_behind_any_node(held: Held) -> None:
    full = Path("/dev/full")
    pid, other = held.run(OPEN, full), held.run(OPEN, "/dev/zero")
    key = key_for_path(str(full))
    assert key == ("c", os.makedev(1, 7))
    result = held.look(full, private=False)
    assert list(result.found) == [pid]
    assert other in result.table


def test_both_ways_of_reading_mappings_agree(tmp_path: Path) -> None:
    path = tmp_path / "with spaces\nand more"
    path.write_bytes(b"\0" * NODE)
    with open(path, "r+b") as handle, mmap.mmap(handle.fileno(), NODE):
        asked = list(Mappings(shared_only=True).of("/proc/self/maps"))
        textual = parse_maps(Path("/proc/self/maps").read_bytes(), shared_only=True)
    assert [region for region in textual if region.path == str(path)] != []
    assert asked == textual
    assert [region.span for region in asked] == [region.span for region in textual]


def test_a_process_that_may_not_be_looked_at_is_listed(held: Held) -> None:
    node = held.file("nvidia0")
    pid = held.run(OPEN, node)

    def denied(path: str) -> os.stat_result:
        raise PermissionError(13, "Permission denied", path)

    keys = frozenset(key for key in [key_for_path(str(node))] if key)
    result = scan(ProcFS(), Watch(keys, {}, True), pids=[pid], stat=denied)
    assert [item.pid for item in result.unreadable] == [pid]
    assert not result.complete


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EIO])
def test_a_look_that_fails_for_our_own_need_is_a_gap_and_no_absence(held: Held, number: int) -> None:
    node = held.file("nvidia0")
    pid = held.run(OPEN, node)

    def failing(path: str) -> os.stat_result:
        raise OSError(number, os.strerror(number), path)

    keys = frozenset(key for key in [key_for_path(str(node))] if key)
    result = scan(ProcFS(), Watch(keys, {}, True), pids=[pid], stat=failing)
    assert [item.pid for item in result.unreadable] == [pid]


def test_files_of_other_machines_are_never_asked_about(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path, gpus=1, real=True)
    tree.add(5, opens=[tree.file("model.safetensors"), tree.gpu(0)])
    tree.map(5, [tree.file("mapped.bin")])
    mount = "40 30 0:50 / %s rw - nfs4 server:/models rw\n41 30 0:5 / %s rw - devtmpfs udev rw\n"
    (tree.proc / "5/mountinfo").write_text(mount % (tmp_path / "files", tree.dev), encoding="utf-8")
    (tree.proc / "filesystems").write_text("nodev\tsysfs\nnodev\tnfs4\n\text4\n", encoding="utf-8")

    def stat(path: str) -> os.stat_result:
        assert "/files/" not in os.path.realpath(path), "would hang"
        return tree.stat(path)

    key = ("c", os.makedev(195, 0))
    result = scan(ProcFS(str(tree.proc)), Watch(frozenset([key]), {"nvidia0": key}), stat=stat)
    assert list(result.found) == [5]
    assert result.unreadable == []


@pytest.mark.parametrize(
    ("path", "remote"),
    [
        ("/data", True),
        ("/data/a/b", True),
        ("/database", False),
        ("/data/local/x", False),
        ("/data/local", False),
        ("/with space/x", True),
        ("/", False),
    ],
)
def test_remote_mounts_end_where_local_ones_begin(path: str, remote: bool) -> None:
    text = (
        b"1 0 8:1 / / rw - ext4 /dev/sda rw\n"
        b"2 1 0:9 / /data rw,relatime shared:3 - nfs4 s:/x rw\n"
        b"3 2 8:2 / /data/local rw - xfs /dev/sdb rw\n"
        b"4 1 0:8 / /with\\040space rw - fuse.sshfs x rw\n"
    )
    assert any(mount.has(path) for mount in parse_mounts(text)) is remote


@given(some.binary(max_size=200))
def test_no_text_breaks_the_list_of_mounts(raw: bytes) -> None:
    parse_mounts(raw)


# The watchdog of the test run is a thread; modules have none when they look.
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_helpers_find_what_one_process_finds(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    node = held.file("nvidia0")
    pids = [held.run(OPEN, node if number % 2 else "/dev/null") for number in range(6)]
    alone = held.look(node)
    monkeypatch.setattr(scan_module, "_SHARE", 1)
    monkeypatch.setattr(scan_module.os, "sched_getaffinity", lambda _pid: {0, 1, 2})
    shared = held.look(node)
    assert sorted(shared.found) == sorted(alone.found) == sorted(pids[1::2])
    assert list(shared.table) == sorted(pids)
    assert shared.processes == alone.processes == 6
    assert [shared.found[pid].opened for pid in pids[1::2]] == [alone.found[pid].opened for pid in pids[1::2]]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_helper_that_fails_is_replaced(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    node = held.file("nvidia0")
    pids = [held.run(OPEN, node) for _ in range(4)]
    parent = os.getpid()

    def fragile(path: str) -> os.stat_result:
        if os.getpid() != parent:
            os._exit(9)
        return os.stat(path)

    monkeypatch.setattr(scan_module, "_SHARE", 1)
    monkeypatch.setattr(scan_module.os, "sched_getaffinity", lambda _pid: {0, 1})
    keys = frozenset(key for key in [key_for_path(str(node))] if key)
    result = scan(ProcFS(), Watch(keys, {}, True), pids=pids, stat=fragile)
    assert sorted(result.found) == sorted(pids)


def test_a_main_thread_that_exits_during_the_look_hides_nothing(held: Held) -> None:
    """Its state was read while it lived; its descriptors are listed when it has gone."""
    node = held.file("nvidia0")
    pid = held.run(LEADERLESS, node)
    while ProcFS().process(pid).state != "Z":
        os.sched_yield()

    class Late(ProcFS):
        def process(self, pid: int) -> Process:
            raw = super().process(pid).raw
            return Process(self, pid, raw.replace(b") Z ", b") S ", 1))

    keys = frozenset(key for key in [key_for_path(str(node))] if key)
    assert list(scan(Late(), Watch(keys, {}, True), pids=[pid]).found) == [pid]


def test_a_thread_of_this_process_is_no_process(held: Held) -> None:
    node = held.file("nvidia0")
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert scan(ProcFS(), Watch(frozenset(), {}), pids=[thread.native_id or 0]).table == {}
        assert held.look(node).found == {}
    finally:
        stop.set()
        thread.join()


def test_the_stand_in_of_the_kernel_call_is_there() -> None:
    """kcmp(2) is what finds threads with descriptors of their own; where it is missing they are not looked at."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.syscall(312 if os.uname().machine == "x86_64" else 272, os.getpid(), os.getpid(), 2, 0, 0) == 0


def test_a_holder_that_ends_during_the_look_holds_nothing(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path, gpus=1, real=True)
    for pid in (5, 6):
        tree.add(pid, opens=[tree.gpu(0)], argv=["nvidia-smi"], exe="/usr/bin/nvidia-smi")

    def stat(path: str) -> os.stat_result:
        if "/6/fd/" in path and (tree.proc / "5").exists():
            tree.end(5)
        return tree.stat(path)

    key = ("c", os.makedev(195, 0))
    result = scan(ProcFS(str(tree.proc)), Watch(frozenset([key]), {"nvidia0": key}), stat=stat)
    assert list(result.found) == [6]
    tree.end(6)
    # Who it was is known, although it has ended before anybody asked.
    process = result.found[6].process
    assert (process.exe, process.argv, process.uid) == ("/usr/bin/nvidia-smi", ["nvidia-smi"], 1000)
    assert process.cgroup.endswith("session-3.scope")
