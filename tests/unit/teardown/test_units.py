# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What systemctl is asked, and what becomes of its answers."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.teardown.units import (
    Systemd,
    UnitKey,
    check_unit,
    may_stop,
    parse_show,
)

SYSTEMCTL = """#!/usr/bin/env python3
import json, os, sys, time
with open(%(calls)r, "a") as handle:
    handle.write(json.dumps({"argv": sys.argv[1:], "env": sorted(os.environ)}) + "\\n")
verb = next(word for word in sys.argv[1:] if not word.startswith("-"))
answer = json.load(open(%(answers)r)).get(verb, {})
time.sleep(answer.get("seconds", 0))
sys.stdout.write(answer.get("out", ""))
sys.stderr.write(answer.get("err", ""))
sys.exit(answer.get("code", 0))
"""


class Manager:
    """A systemctl that writes down what it is told and answers what the test says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls_file = folder / "calls"
        self.answers = folder / "answers"
        self.answers.write_text("{}", encoding="utf-8")
        program = folder / "bin" / "systemctl"
        program.parent.mkdir()
        program.write_text(SYSTEMCTL % {"calls": str(self.calls_file), "answers": str(self.answers)}, encoding="utf-8")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", "%s:%s" % (program.parent, os.environ["PATH"]))
        monkeypatch.setenv("SECRET_TOKEN", "hush")
        self.systemd = Systemd(booted=str(folder))

    def answer(self, verb: str, **how: object) -> None:
        self.answers.write_text(json.dumps({verb: how}), encoding="utf-8")

    @property
    def calls(self) -> list[dict[str, list[str]]]:
        return [json.loads(line) for line in self.calls_file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manager:
    return Manager(tmp_path, monkeypatch)


BLOCK = "Id=%s\nLoadState=loaded\nActiveState=active\nSubState=running\nMainPID=%d\nControlGroup=%s\nRestart=%s\n"


def test_one_question_for_all_units_of_a_manager(manager: Manager) -> None:
    manager.answer(
        "show",
        out="Id=real-name.service\nLoadState=not-found\nActiveState=inactive\nMainPID=0\nControlGroup=\nRestart=no\n\n"
        + BLOCK % ("b.service", 77, "/system.slice/b.service", "on-failure"),
    )
    one, two = UnitKey("a.service"), UnitKey("b.service")
    states = manager.systemd.show([one, two, one])
    assert len(manager.calls) == 1
    assert manager.calls[0]["argv"][-3:] == ["--", "a.service", "b.service"]
    assert "SECRET_TOKEN" not in manager.calls[0]["env"]
    assert (states[one].known, states[one].live, states[one].restarts) == (False, False, False)
    assert (states[two].main_pid, states[two].cgroup, states[two].restarts) == (77, "/system.slice/b.service", True)
    assert states[two].live


def test_an_answer_that_does_not_fit_the_question_is_none(manager: Manager) -> None:
    manager.answer("show", out=BLOCK % ("b.service", 77, "/", "no"))
    assert manager.systemd.show([UnitKey("a.service"), UnitKey("b.service")]) == {}


def test_a_manager_that_hangs_knows_nothing(manager: Manager) -> None:
    manager.answer("show", seconds=30)
    manager.systemd.patience = 0.5
    began = time.monotonic()
    assert manager.systemd.show([UnitKey("a.service")]) == {}
    assert time.monotonic() - began < 10


def test_without_systemd_nothing_is_asked(manager: Manager, tmp_path: Path) -> None:
    assert Systemd(booted=str(tmp_path / "no")).show([UnitKey("a.service")]) == {}
    assert not manager.calls_file.exists()


def test_without_systemctl_nothing_is_stopped(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert manager.systemd.stop(UnitKey("a.service")) is None
    assert manager.systemd.show([UnitKey("a.service")]) == {}


def test_stop(manager: Manager) -> None:
    job = manager.systemd.stop(UnitKey("llm@x.service"))
    assert job is not None
    while not job.done:
        time.sleep(0.01)
    job.give_up()
    assert not job.failed
    assert manager.calls[0]["argv"] == ["--no-ask-password", "stop", "--", "llm@x.service"]


def test_a_stop_that_fails_says_why_in_print(manager: Manager) -> None:
    manager.answer("stop", err="Access \x1b[31mdenied\n", code=4)
    job = manager.systemd.stop(UnitKey("a.service"))
    assert job is not None
    while not job.done:
        time.sleep(0.01)
    assert job.failed
    assert job.error() == "Access \\x1b[31mdenied"
    job.give_up()


def test_giving_up_ends_the_client(manager: Manager) -> None:
    manager.answer("stop", seconds=60)
    job = manager.systemd.stop(UnitKey("a.service"))
    assert job is not None
    began = time.monotonic()
    job.give_up()
    assert job.done
    assert time.monotonic() - began < 10


def test_managers_of_users() -> None:
    own = UnitKey("a.service", os.geteuid())
    assert own.stop_command == ["systemctl", "--no-ask-password", "--user", "stop", "--", "a.service"]
    other = UnitKey("a.service", os.geteuid() + 1)
    assert "--machine=%d@.host" % (os.geteuid() + 1) in other.stop_command
    assert str(other) == "a.service of user %d" % (os.geteuid() + 1)


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("llm", "llm.service"),
        ("llm.service", "llm.service"),
        ("llm@a.service", "llm@a.service"),
        ("run-1.scope", "run-1.scope"),
    ],
)
def test_names_of_units(name: str, full: str) -> None:
    assert check_unit(name) == full


@pytest.mark.parametrize(
    "name",
    [
        "",
        "-x",
        "a b",
        "a/b",
        "a\n",
        "session-3.scope",
        "user@1000.service",
        "init.scope",
        "user.slice",
        "dbus.service",
        "systemd-logind.service",
        "multi-user.target",
        "network-online.target",
        "home.mount",
        "dev-sda1.swap",
        "é",
    ],
)
def test_units_that_are_never_stopped(name: str) -> None:
    with pytest.raises(CleanslateError) as caught:
        check_unit(name)
    assert caught.value.details["option"] == "units"
    assert not may_stop(name)


def test_only_services_are_stopped_unasked() -> None:
    assert may_stop("llm.service")
    assert not may_stop("run-1.scope")


@given(some.text())
def test_no_answer_breaks_the_parser(text: str) -> None:
    for block in parse_show(text):
        assert block


def test_a_guests_units_are_reached_through_the_guest(
    manager: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "enter"
    folder.mkdir()
    for name in ("pct", "lxc-attach"):
        (folder / name).write_text(
            '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done; shift; exec "$@"\n', encoding="utf-8"
        )
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", "%s:%s" % (folder, os.environ["PATH"]))
    proxmox, plain = UnitKey("llm.service", None, "129"), UnitKey("llm.service", None, "web")
    assert proxmox.stop_command[:4] == ["pct", "exec", "129", "--"]
    assert plain.stop_command[:4] == ["lxc-attach", "-n", "web", "--"]
    assert str(proxmox) == "llm.service in container 129"
    manager.answer("show", out=BLOCK % ("llm.service", 77, "/system.slice/llm.service", "always"))
    # The host needs no systemd of its own for that.
    states = Systemd(booted=str(tmp_path / "no")).show([proxmox, plain])
    assert states[proxmox].main_pid == states[plain].main_pid == 77
