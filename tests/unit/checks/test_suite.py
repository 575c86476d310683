# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The runner of the checks: what it counts, skips, ends and says at the end, with a table that each test writes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

PASSING = '<testsuites><testsuite tests="3" failures="0" errors="0" skipped="1"/></testsuites>'


class Suite:
    """A checkout with the real runner and a table that the test writes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        shutil.copytree(ROOT / "tests/suite", root / "tests/suite", ignore=shutil.ignore_patterns("__pycache__"))

    def start(self, table: str, *names: str, ci: str = "") -> subprocess.Popen[str]:
        (self.root / "tests/suite/stages.py").write_text(
            "import sys\nfrom stage import *\n"
            "def stage(name, code, **more):\n"
            "    more = {'group': 'all', **more}\n"
            "    return Stage(name, [sys.executable, '-c', code], **more)\n"
            f"STAGES = [{table}]\n"
        )
        return subprocess.Popen(
            [sys.executable, self.root / "tests/suite", *names],
            env={**os.environ, "CI": ci},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, table: str, *names: str, ci: str = "") -> tuple[int, list[str]]:
        """Exit code and lines of output."""
        process = self.start(table, *names, ci=ci)
        output = process.communicate(timeout=60)[0]
        return process.returncode, output.splitlines()


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


def test_counts_stages_and_ends_with_the_sum(suite: Suite) -> None:
    code, lines = suite.run(
        "stage('one', ''), stage('two', 'print(\"boom\"); raise SystemExit(3)'), stage('three', '')"
    )
    assert code == 1
    assert lines[-1] == "2 passed, 1 failed, 0 skipped"
    assert any(line.startswith("FAILED   two") and "exit code 3" in line for line in lines)
    assert "    | boom" in lines
    assert (suite.root / "build/logs/two.log").read_text() == "boom\n"


def test_all_well_is_exit_code_zero(suite: Suite) -> None:
    assert suite.run("stage('one', '')")[0] == 0


def test_nothing_run_is_no_success(suite: Suite) -> None:
    code, lines = suite.run("")
    assert code == 1
    assert lines[-1] == "0 passed, 0 failed, 0 skipped"


def test_named_stages_and_groups_run_alone(suite: Suite) -> None:
    table = "stage('one', '', group='a'), stage('two', '', group='a'), stage('three', '', group='b')"
    assert suite.run(table, "a")[1][-1] == "2 passed, 0 failed, 0 skipped"
    assert suite.run(table, "three", "one")[1][-1] == "2 passed, 0 failed, 0 skipped"
    code, lines = suite.run(table, "four")
    assert code == 2
    assert any("no stage or group four" in line for line in lines)


def test_an_unmet_need_skips_with_its_reason(suite: Suite) -> None:
    code, lines = suite.run("stage('one', ''), stage('two', '1/0', needs=[lambda: 'needs a moon'])")
    assert code == 0
    assert lines[-1] == "1 passed, 0 failed, 1 skipped"
    assert "Left out: two (needs a moon)" in lines


def test_a_skip_is_a_failure_with_ci(suite: Suite) -> None:
    code, lines = suite.run("stage('one', ''), stage('two', '', needs=[lambda: 'needs a moon'])", ci="true")
    assert code == 1
    assert lines[-1] == "1 passed, 1 failed, 0 skipped"


@pytest.mark.parametrize(
    ("report", "ci", "code", "sum_"),
    [
        (PASSING, "", 0, "2 passed, 0 failed, 1 skipped"),
        (PASSING, "true", 1, "2 passed, 1 failed, 0 skipped"),
        (PASSING.replace('errors="0"', 'errors="1"'), "", 1, "1 passed, 1 failed, 1 skipped"),
        (PASSING.replace('tests="3"', 'tests="0"'), "", 1, "0 passed, 1 failed, 0 skipped"),
        ("", "", 1, "0 passed, 1 failed, 0 skipped"),
    ],
)
def test_counts_the_tests_of_a_report(suite: Suite, report: str, ci: str, code: int, sum_: str) -> None:
    write = f"open('report.xml', 'w').write({report!r})"
    got, lines = suite.run(f"stage('tests', {write!r}, junit=ROOT / 'report.xml')", ci=ci)
    assert (got, lines[-1]) == (code, sum_)


def test_a_report_of_an_earlier_run_does_not_count(suite: Suite) -> None:
    (suite.root / "report.xml").write_text(PASSING)
    code, lines = suite.run("stage('tests', '', junit=ROOT / 'report.xml')")
    assert (code, lines[-1]) == (1, "0 passed, 1 failed, 0 skipped")


def test_a_failing_command_fails_even_with_a_good_report(suite: Suite) -> None:
    write = f"open('report.xml', 'w').write({PASSING!r}); raise SystemExit(2)"
    code, lines = suite.run(f"stage('tests', {write!r}, junit=ROOT / 'report.xml')")
    assert (code, lines[-1]) == (1, "2 passed, 1 failed, 1 skipped")


def test_lines_come_in_the_order_of_the_table(suite: Suite) -> None:
    # The first of the two that run beside each other ends when the second one has.
    wait = "import pathlib, time\nwhile not pathlib.Path('done').exists(): time.sleep(0.01)"
    done = "open('done', 'w').close()"
    code, lines = suite.run(f"stage('a', {wait!r}, shares_machine=True), stage('b', {done!r}, shares_machine=True)")
    assert code == 0
    assert [line.split()[1] for line in lines[:2]] == ["a", "b"]


def test_a_stage_that_hangs_is_ended(suite: Suite) -> None:
    code, lines = suite.run("stage('hangs', 'import time; time.sleep(600)', timeout=0.5), stage('next', '')")
    assert code == 1
    assert any(line.startswith("FAILED   hangs") and "not done after" in line for line in lines)
    assert lines[-1] == "1 passed, 1 failed, 0 skipped"


@pytest.mark.parametrize("own_session", [False, True])
def test_processes_left_running_are_a_failure_and_are_ended(suite: Suite, own_session: bool) -> None:
    leave = (
        "import subprocess, sys\n"
        "code = 'import time; time.sleep(600)'\n"
        f"child = subprocess.Popen([sys.executable, '-c', code], start_new_session={own_session})\n"
        "open('pid', 'w').write(str(child.pid))"
    )
    code, lines = suite.run(f"stage('leaves', {leave!r})")
    assert code == 1
    assert any("left running" in line for line in lines)
    assert _gone(int((suite.root / "pid").read_text()))


def test_interrupted_it_ends_what_runs_and_starts_no_more(suite: Suite) -> None:
    slow = (
        "import os, time; open('pid.part', 'w').write(str(os.getpid())); os.rename('pid.part', 'pid'); time.sleep(600)"
    )
    process = suite.start(f"stage('slow', {slow!r}), stage('next', 'open(\"started\", \"w\")')")
    try:
        deadline = time.monotonic() + 30
        while not (suite.root / "pid").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=30)[0]
    finally:
        process.kill()
    assert process.returncode == 1
    assert output.splitlines()[-1] == "0 passed, 2 failed, 0 skipped"
    assert _gone(int((suite.root / "pid").read_text()))
    assert not (suite.root / "started").exists()


def test_settings_of_the_user_do_not_reach_a_stage(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANSIBLE_STRATEGY", "free")
    monkeypatch.setenv("PYTHONPATH", "/nonexistent")
    look = "import os, sys; sys.exit('ANSIBLE_STRATEGY' in os.environ or 'PYTHONPATH' in os.environ)"
    assert suite.run(f"stage('looks', {look!r})")[0] == 0


def _gone(pid: int) -> bool:
    """Whether a process ends within a moment (one that waits to be reaped has ended)."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False
