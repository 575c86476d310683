# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whole teardowns of real processes on stand-in GPUs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from .holders import Holders, holders, pids_of, reasons_of


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Holders]:
    with holders(tmp_path) as made:
        yield made


def test_a_matched_holder_ends_by_term(lab: Holders) -> None:
    scheduler = lab.start(title="sglang::scheduler_TP0", maps=[0])
    stranger = lab.start(title="trainer", maps=[1])
    result = lab.tear_down(scope="match")
    assert result["changed"]
    assert reasons_of(result["killed"]) == {scheduler.pid: "match"}
    assert result["killed"][0]["signal"] == "TERM"
    assert scheduler.wait(20) == -signal.SIGTERM
    assert stranger.poll() is None
    assert reasons_of(result["spared"]) == {stranger.pid: "foreign_holder"}
    assert result["simulated"] is True


def test_a_second_run_changes_nothing(lab: Holders) -> None:
    lab.start(title="sglang::scheduler", maps=[0])
    lab.tear_down(scope="match")
    again = lab.tear_down(scope="match")
    assert (again["changed"], again["killed"], again["spared"]) == (False, [], [])
    assert again["msg"] == "Nothing to end; 0 spared."


def test_check_mode_shows_the_same_list_and_signals_nobody(lab: Holders) -> None:
    one = lab.start(title="sglang::scheduler_TP0", maps=[0])
    two = lab.start(title="sglang::scheduler_TP1", maps=[1])
    planned = lab.tear_down(check=True, scope="match")
    assert planned["changed"]
    assert planned["killed"][0]["start_time"] > 0
    assert one.poll() is None
    assert two.poll() is None
    assert not (lab.folder / "run").exists()
    done = lab.tear_down(scope="match")
    assert pids_of(done["killed"]) == pids_of(planned["killed"]) == {one.pid, two.pid}


def test_who_ignores_term_is_killed_after_the_grace(lab: Holders) -> None:
    stubborn = lab.start(title="sglang::scheduler", maps=[0], extra="signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    result = lab.tear_down(scope="match", term_timeout=0.5)
    assert stubborn.wait(20) == -signal.SIGKILL
    assert result["killed"][0]["signal"] == "KILL"
    assert 0.5 <= result["killed"][0]["seconds"] < 5


def test_who_takes_its_time_gets_no_kill_and_nobody_waits_longer(lab: Holders) -> None:
    slow = lab.start(
        title="sglang::scheduler",
        maps=[0],
        extra="signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), os._exit(7)))",
    )
    result = lab.tear_down(scope="match", term_timeout=10)
    assert slow.wait(20) == 7
    assert result["killed"][0]["signal"] == "TERM"
    assert 0.9 < result["elapsed"] < 4


def test_a_stopped_process_is_continued(lab: Holders) -> None:
    stopped = lab.start(title="sglang::scheduler", maps=[0])
    os.kill(stopped.pid, signal.SIGSTOP)
    result = lab.tear_down(scope="match")
    assert stopped.wait(20) == -signal.SIGTERM
    assert result["killed"][0]["signal"] == "TERM"
    assert result["elapsed"] < 5


def test_all_ends_every_unprotected_holder(lab: Holders) -> None:
    one = lab.start(title="trainer", maps=[0])
    kept = lab.start(title="exporter", maps=[1])
    result = lab.tear_down(scope="all", protect=["exporter"])
    assert reasons_of(result["killed"]) == {one.pid: "holder"}
    assert reasons_of(result["spared"]) == {kept.pid: "protected"}
    assert kept.poll() is None
