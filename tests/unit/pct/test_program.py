# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Programs that are run to their end: real ones, with bounds on time and words."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.pct import program
from ansible_collections.cleanslate.inference.plugins.module_utils.pct.program import run


def test_words_streams_and_code() -> None:
    ended = run(["sh", "-c", 'printf "%s|" "$@"; cat; echo err >&2; exit 7', "x", "a b", "", "$y"], b"in")
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, b"a b||$y|in", b"err\n")
    assert not ended.timed_out
    assert not ended.cut


def test_nothing_of_our_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert run([sys.executable, "-c", "import os; print(sorted(os.environ))"]).stdout.strip() in (
        b"['PATH']",
        b"['LC_CTYPE', 'PATH']",  # Python's own
    )


def test_a_reader_that_reads_nothing_of_much() -> None:
    assert run(["true"], b"x" * (1 << 20)).returncode == 0


def test_more_than_a_pipe_holds_in_both_directions() -> None:
    data = bytes(range(256)) * 4096
    assert run(["cat"], data).stdout == data


def test_a_flood_is_cut_in_its_middle() -> None:
    ended = run(["sh", "-c", "echo first; head -c 300000 /dev/zero | tr '\\0' x; echo last"], limit=10000)
    assert ended.cut
    assert len(ended.stdout) < 10020
    assert ended.stdout.startswith(b"first\nx")
    assert ended.stdout.endswith(b"xlast\n")


def test_time_ends_the_whole_group(tmp_path: Path) -> None:
    """What pct exec starts in a container shares its process group."""
    script = 'sleep 300 & echo $! > "$1"; wait'
    begun = time.monotonic()
    ended = run(["sh", "-c", script, "x", str(tmp_path / "pid")], timeout=0.3)
    assert ended.timed_out
    assert time.monotonic() - begun < 20
    pid = int((tmp_path / "pid").read_text(encoding="ascii"))
    deadline = time.monotonic() + 5
    while _lives(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _lives(pid)


def _lives(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False


def test_a_flood_does_not_outlast_its_time() -> None:
    begun = time.monotonic()
    ended = run(["yes"], timeout=0.3, limit=10000)
    assert (ended.timed_out, ended.cut) == (True, True)
    assert time.monotonic() - begun < 20


def test_who_ignores_term_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_GRACE", 0.2)
    ended = run(["sh", "-c", "trap '' TERM; while :; do sleep 0.05; done"], timeout=0.2)
    assert (ended.timed_out, ended.returncode) == (True, -9)


def test_what_is_left_behind_with_our_pipes_is_not_waited_for(tmp_path: Path) -> None:
    begun = time.monotonic()
    ended = run(["sh", "-c", 'setsid sleep 60 & echo $! > "$1"; echo done', "x", str(tmp_path / "pid")], timeout=30)
    assert (ended.returncode, ended.stdout, ended.timed_out) == (0, b"done\n", False)
    assert time.monotonic() - begun < 20
    os.kill(int((tmp_path / "pid").read_text(encoding="ascii")), 9)


def test_no_such_program() -> None:
    with pytest.raises(FileNotFoundError):
        run(["/nosuch/pct"])


def test_no_descriptor_stays_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    run(["true"], b"x")
    assert len(os.listdir("/proc/self/fd")) == before
