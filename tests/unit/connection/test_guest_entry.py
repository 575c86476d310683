# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How a command enters a guest, and what its end means. The texts are those of pve-container 6.1.10 and lxc 6.0.4."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from ansible_collections.cleanslate.inference.plugins.plugin_utils.guest_entry import (
    MARK,
    Cause,
    Left,
    LxcAttach,
    OldPctExec,
    PctExec,
)

HOSTILE = ["a b", "$(touch /tmp/escaped)", "`id`", "it's", 'say "hi"', "ü\n;x", "*", "\\", "", "-n", "--", "{}", "!"]


@pytest.fixture
def entry() -> PctExec:
    return PctExec("131")


def inner(line: str) -> list[str]:
    """What the hypervisor's shell makes of a line, as words."""
    return shlex.split(line)


def test_pct_is_asked_for_an_environment_of_the_guests_own(entry: PctExec) -> None:
    words = inner(entry.line("true"))
    assert words[:8] == ["pct", "exec", "131", "--keep-env", "0", "--", "/bin/sh", "-c"]


def test_lxc_attach_takes_the_same_command() -> None:
    words = inner(LxcAttach("131").line("true"))
    assert words[:7] == ["lxc-attach", "-n", "131", "--clear-env", "--", "/bin/sh", "-c"]


def test_sudo_goes_first() -> None:
    assert inner(PctExec("131", sudo=True).line("true"))[:3] == ["sudo", "-n", "pct"]


@pytest.mark.parametrize("vmid", ["", "0", "99", "0129", "129;id", "129 130", "-1", "x", "129\n"])
def test_an_id_is_digits(vmid: str) -> None:
    with pytest.raises(ValueError, match="not a container id"):
        PctExec(vmid)


def run_as_a_guest_would(entry: PctExec, command: str, **options: bytes) -> subprocess.CompletedProcess[bytes]:
    """The line without the way in: what pct hands to the guest, run here."""
    words = inner(entry.line(command))
    argv = words[words.index("--") + 1 :]
    return subprocess.run(argv, capture_output=True, check=False, env={"PATH": "/usr/bin:/bin"}, **options)


@pytest.mark.parametrize("word", HOSTILE)
def test_words_arrive_as_they_are(entry: PctExec, word: str) -> None:
    done = run_as_a_guest_would(entry, shlex.join(["printf", "%s", word]))
    assert entry.outcome(done.returncode, done.stdout, done.stderr).stdout.decode() == word


@pytest.mark.parametrize("code", [0, 1, 2, 126, 127, 137, 255])
def test_a_commands_code_is_its_own(entry: PctExec, code: int) -> None:
    done = run_as_a_guest_would(entry, f"echo out; echo err >&2; exit {code}")
    outcome = entry.outcome(done.returncode, done.stdout, done.stderr)
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (code, b"out\n", b"err\n")


def test_a_command_that_is_killed(entry: PctExec) -> None:
    done = run_as_a_guest_would(entry, "kill -KILL $$")
    assert entry.outcome(done.returncode, done.stdout, done.stderr).returncode == 137


def test_stdin_reaches_the_command(entry: PctExec) -> None:
    done = run_as_a_guest_would(entry, "cat", input=b"\x00binary\xff")
    assert done.stdout == b"\x00binary\xff"


def test_the_environment(entry: PctExec) -> None:
    done = run_as_a_guest_would(entry, "echo $HOME $USER $PATH; pwd")
    home, user, path = done.stdout.decode().split("\n")[0].split()
    assert home.startswith("/")
    assert user == "root"
    assert path.startswith("/usr/local/sbin:")
    assert done.stdout.decode().splitlines()[1] == home


def test_a_report_without_a_line_of_its_own(entry: PctExec) -> None:
    outcome = entry.outcome(0, b"", b"no newline" + f"{entry.token} 3\n".encode())
    assert (outcome.returncode, outcome.stderr) == (3, b"no newline")


def test_what_a_background_process_says_later_is_kept(entry: PctExec) -> None:
    outcome = entry.outcome(0, b"", f"before\n{entry.token} 0\nafter\n".encode())
    assert (outcome.returncode, outcome.stderr) == (0, b"before\nafter\n")


def test_a_terminal_brings_the_report_on_stdout(entry: PctExec) -> None:
    outcome = entry.outcome(0, f"out\r\n{entry.token} 4\r\r\n".encode(), b"Shared connection closed.\r\n")
    assert (outcome.returncode, outcome.stdout) == (4, b"out\r\n")


def test_another_connections_token_is_no_report(entry: PctExec) -> None:
    other = PctExec("131")
    assert entry.outcome(255, b"", f"{other.token} 0\n".encode()).returncode is None


@pytest.mark.parametrize(
    ("code", "stderr", "says"),
    [
        (255, "container '131' not running!\n", "container 131 is not running (pct start 131)"),
        (2, "Configuration file 'nodes/px1/lxc/131.conf' does not exist\n", "container 131 does not exist on node px1"),
        (127, "bash: line 1: pct: command not found\n", "no pct"),
        (127, "sh: 1: pct: not found\n", "no pct"),
        (1, "sudo: pct: command not found\n", "no pct"),
        (1, "sudo: a password is required\n", "sudo -n on the hypervisor: a password is required"),
        (255, "ipcc_send_rec[1] failed: Unknown error -1\n", "needs root"),
        (2, "400 Parameter verification failed.\nvmid: …\n", "pct refuses the call: 400 Parameter"),
        (137, "", "container 131 could not be entered (code 137)"),
        (1, "sudo: sorry, user ops is not allowed to execute '/usr/sbin/pct' as root on px1.\n", "is not allowed"),
        (127, "sh: 1: sudo: not found\n", "has no sudo"),
        (
            127,
            "lxc-attach: 131: ../src/lxc/attach.c: lxc_attach_run_command: 1841 No such file or directory"
            ' - Failed to exec "/bin/sh"\n',
            "has no /bin/sh",
        ),
    ],
)
def test_failures_on_the_way(entry: PctExec, code: int, stderr: str, says: str) -> None:
    outcome = entry.outcome(code, b"", stderr.encode())
    assert outcome.returncode is None
    assert outcome.cause not in (Cause.NONE, Cause.LOST, Cause.CUT)
    assert says in outcome.problem


def test_only_ssh_itself_is_lost(entry: PctExec) -> None:
    outcome = entry.outcome(255, b"", b"ssh: connect to host px1 port 22: No route to host\r\n")
    assert outcome.cause is Cause.LOST
    assert outcome.returncode is None


def test_a_command_that_was_cut_off(entry: PctExec) -> None:
    """It has begun, so it must not be run again; the process that it left is named."""
    outcome = entry.outcome(255, b"part", f"{entry.token} in 77\nShared connection to px1 closed.\r\n".encode())
    assert (outcome.cause, outcome.begun, outcome.stdout) == (Cause.CUT, 77, b"part")
    assert "container 131 as process 77" in outcome.problem
    assert entry.token not in outcome.problem


def test_an_end_that_was_cut_off(entry: PctExec) -> None:
    """The report came through, perhaps not all of the output."""
    outcome = entry.outcome(255, b"part", f"{entry.token} in 77\n{entry.token} 0\n".encode())
    assert (outcome.returncode, outcome.cause) == (None, Cause.CUT)


def test_a_command_that_ends_without_a_word(entry: PctExec) -> None:
    outcome = entry.outcome(137, b"", f"{entry.token} in 77\n".encode())
    assert (outcome.returncode, outcome.cause) == (None, Cause.ENDED)


def test_a_pct_without_keep_env(entry: PctExec) -> None:
    text = "Unknown option: keep-env\n400 unable to parse option\npct exec <vmid> [<extra-args>] [OPTIONS]\n"
    assert entry.outcome(2, b"", text.encode()).cause is Cause.OLD_PCT


def test_an_old_pct_gets_a_clean_environment_by_the_guests_env() -> None:
    entry = OldPctExec("131")
    words = inner(entry.line("env"))
    assert words[:4] == ["pct", "exec", "131", "--"]
    done = subprocess.run(words[4:], capture_output=True, check=False, env={"LEAK": "1", "PATH": "/bin:/usr/bin"})
    shown = entry.outcome(done.returncode, done.stdout, done.stderr)
    assert shown.returncode == 0
    assert {line.split(b"=")[0] for line in shown.stdout.splitlines()} <= {
        *(b"HOME", b"PATH", b"USER", b"LOGNAME", b"PWD", b"OLDPWD", b"TERM", b"container", b"_", b"SHLVL")
    }


def test_a_command_that_prints_pcts_texts_is_believed(entry: PctExec) -> None:
    outcome = entry.outcome(0, b"", f"container '131' not running!\n{entry.token} 255\n".encode())
    assert (outcome.returncode, outcome.problem) == (255, "")


def test_a_command_that_prints_the_wrappers_command_line_reports_nothing(entry: PctExec) -> None:
    """`ps` in a guest shows the token; a report has more than the token."""
    line = " ".join(inner(entry.line("ps"))[6:])
    assert entry.outcome(0, b"", line.encode()).returncode is None


def test_a_running_command_is_known_to_the_next_one(tmp_path: Path) -> None:
    """With the guest's /run elsewhere: the mark is there while the command runs, and gone afterwards."""
    first, second = PctExec("131", owner="laptop/1f/42/4711"), PctExec("131", owner="ci/2f/43/4712")

    def words(entry: PctExec, command: str) -> list[str]:
        argv = inner(entry.line(command))
        argv = argv[argv.index("--") + 1 :]
        return [word.replace(MARK, str(tmp_path / "mark")) for word in argv]

    with subprocess.Popen(
        words(first, "echo up; read -r line"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as running:
        assert running.stdin and running.stdout
        assert running.stdout.readline() == b"up\n"
        (tmp_path / "mark.1").write_text("1 laptop/1f/1/1\n", encoding="ascii")  # of a process that is another one now
        (tmp_path / "mark.2").touch()  # being written
        done = subprocess.run(words(second, "true"), capture_output=True, check=False)
        outcome = second.outcome(done.returncode, done.stdout, done.stderr)
        (left,) = outcome.left
        assert left == Left(running.pid, os.getpid(), left.innermost, "laptop/1f/42/4711", left.name)
        assert left.innermost != running.pid
        assert left.name == "sh"
        assert not (tmp_path / "mark.1").exists()
        running.stdin.close()
        assert running.wait(10) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["mark.2"]


def test_a_mark_that_cannot_be_left_stops_nothing(entry: PctExec, tmp_path: Path) -> None:
    argv = [word.replace(MARK, str(tmp_path / "no/such/mark")) for word in inner(entry.line("echo out"))]
    done = subprocess.run(argv[argv.index("--") + 1 :], capture_output=True, check=False)
    outcome = entry.outcome(done.returncode, done.stdout, done.stderr)
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, b"out\n", b"")


@pytest.mark.parametrize("name", ["plain", "it's a $file", "-n", "ü\nx"])
@pytest.mark.parametrize("content", [b"", b"\x00\xff" * 70_000], ids=["empty", "large"])
def test_files_report_their_size(entry: PctExec, tmp_path: Path, name: str, content: bytes) -> None:
    path = str(tmp_path / name)
    done = run_as_a_guest_would(entry, entry.receive(path), input=content)
    put = entry.outcome(done.returncode, done.stdout, done.stderr)
    assert (put.returncode, put.sizes, put.stderr) == (0, (len(content),), b"")
    done = run_as_a_guest_would(entry, entry.send(path))
    got = entry.outcome(done.returncode, done.stdout, done.stderr)
    assert (got.returncode, got.stdout, got.stderr) == (0, content, b"")
    assert got.sizes == ((len(content),) * 2 if content else ())


def test_a_file_that_is_not_there_or_has_no_room(entry: PctExec, tmp_path: Path) -> None:
    done = run_as_a_guest_would(entry, entry.send(str(tmp_path / "no")))
    missing = entry.outcome(done.returncode, done.stdout, done.stderr)
    assert missing.returncode != 0
    assert b"No such file" in missing.stderr or b"cannot open" in missing.stderr
    done = run_as_a_guest_would(entry, entry.receive("/dev/full"), input=b"x")
    full = entry.outcome(done.returncode, done.stdout, done.stderr)
    assert full.returncode != 0
    assert b"No space" in full.stderr


def test_a_stopped_guest_by_lxc_attach() -> None:
    text = "lxc-attach: 131: ../src/lxc/attach.c: get_attach_context: 405 Connection refused - Failed to get init pid\n"
    outcome = LxcAttach("131").outcome(1, b"", text.encode())
    assert "is not running" in outcome.problem
