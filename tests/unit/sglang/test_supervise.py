# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The supervisor: how a server ended is written down whatever comes between, and its log stays root's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ansible_collections.cleanslate.inference.plugins.module_utils.sglang import launch, supervise


def wait_for_state(pid, letter):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if Path("/proc/%d/stat" % pid).read_text().rpartition(")")[2].split()[0] == letter:
            return
        time.sleep(0.01)
    raise AssertionError("process %d never came to state %s" % (pid, letter))


def test_a_signal_that_meets_a_server_which_has_just_ended_costs_no_exit_status(tmp_path):
    os.mkfifo(tmp_path / "go")
    order = {
        "argv": [sys.executable, "-c", "import sys; open(sys.argv[1]).read(); sys.exit(7)", str(tmp_path / "go")],
        "environment": {},
        "cwd": "/",
        "log": str(tmp_path / "log"),
        "exit_file": str(tmp_path / "exit.json"),
        "uid": None,
        "log_limit": 1000000,
        "log_keep": 1,
    }
    supervisor = subprocess.Popen(
        [sys.executable, "-I", supervise.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    supervisor.stdin.write(json.dumps(order).encode())
    supervisor.stdin.close()
    pid = json.loads(supervisor.stdout.readline())["pid"]
    # It says so before it has its handlers: they are there once its output is gone.
    assert supervisor.stdout.read() == b""
    handlers = 1 << (signal.SIGTERM - 1)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        status = dict(
            line.split(":\t", 1) for line in Path("/proc/%d/status" % supervisor.pid).read_text().splitlines()
        )
        if int(status["SigCgt"], 16) & handlers:
            break
        time.sleep(0.01)
    os.kill(supervisor.pid, signal.SIGSTOP)
    wait_for_state(supervisor.pid, "T")
    with open(tmp_path / "go", "w"):
        pass
    wait_for_state(pid, "Z")
    os.kill(supervisor.pid, signal.SIGTERM)
    os.kill(supervisor.pid, signal.SIGCONT)
    assert supervisor.wait(20) == 0
    supervisor.stdout.close()
    left = json.loads((tmp_path / "exit.json").read_text())
    assert (left["pid"], left["code"]) == (pid, 7)


def test_the_log_is_not_given_to_the_servers_account(tmp_path, monkeypatch):
    """The server has it open; its path is nobody's but ours."""
    given, started = [], []
    monkeypatch.setattr(supervise.os, "fchown", lambda *words: given.append(words))
    monkeypatch.setattr(supervise.subprocess, "Popen", lambda *_, **options: started.append(options))
    supervise.start(
        {"argv": ["x"], "environment": {}, "cwd": "/", "log": str(tmp_path / "log"), "uid": 9, "gid": 9, "groups": [9]}
    )
    assert (started[0]["user"], started[0]["group"]) == (9, 9)
    assert given == []


def test_a_folder_that_was_given_away_is_taken_back(tmp_path, monkeypatch):
    folder, other = tmp_path / "servers", tmp_path / "other"
    folder.mkdir()
    other.write_text("not ours")
    (folder / "server.log").write_text("lines")
    (folder / "server.log.1").symlink_to(other)
    os.link(other, folder / "exit.json")
    given = []
    monkeypatch.setattr(launch.os, "chown", lambda path, *who, **_: given.append((os.path.basename(path), *who)))
    launch.take_back(str(folder))
    assert given == []
    monkeypatch.setattr(launch.os, "geteuid", lambda: 4321)
    monkeypatch.setattr(launch.os, "getegid", lambda: 4322)
    launch.take_back(str(folder))
    assert given == [("servers", 4321, 4322), ("server.log", 4321, 4322)]
    assert [path.name for path in folder.iterdir()] == ["server.log"]
    assert other.read_text() == "not ours"
