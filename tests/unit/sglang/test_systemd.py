# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Units and environment files: every byte arrives. The readers here follow systemd's own rules."""

from __future__ import annotations

import os
import re

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.proc.table import ProcFS
from ansible_collections.cleanslate.inference.plugins.module_utils.sglang import launch
from ansible_collections.cleanslate.inference.plugins.module_utils.sglang import systemd_backend as backend
from ansible_collections.cleanslate.inference.plugins.module_utils.sglang.account import Account
from ansible_collections.cleanslate.inference.plugins.module_utils.sglang.paths import paths
from ansible_collections.cleanslate.inference.plugins.module_utils.state.record import InstanceRecord

HOSTILE = [
    "plain",
    "",
    "two words",
    " spaces at the ends ",
    'say "hello"',
    "it's",
    "back\\slash \\n \\x41",
    "100%",
    "%n %i %%",
    "$HOME ${HOME} $$",
    "`id`",
    ";",
    "#not a comment",
    "a=b",
    "ü 漢字 🚀",
    '{"a": "b \\" c", "d": "%s $e"}',
    "tab\there",
    "-leading",
    "@+!:-|prefixes",
]
ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", '"': '"'}


def read_exec(line):
    """ExecStart= as systemd takes it apart: quotes, C escapes, then % specifiers and $ variables."""
    words = []
    for quoted in re.findall(r'"((?:[^"\\]|\\.)*)"', line):
        text = re.sub(
            r"\\(x[0-9a-f]{2}|.)",
            lambda m: (
                chr(int(m.group(1)[1:], 16)) if m.group(1)[0] == "x" and len(m.group(1)) > 1 else ESCAPES[m.group(1)]
            ),
            quoted,
        )
        assert not re.search(r"(?<!%)%(?:%%)*(?!%)", text), "a lone % is a specifier"
        assert not re.search(r"(?<!\$)\$(?:\$\$)*(?!\$)", text), "a lone $ is a variable"
        words.append(text.replace("%%", "%").replace("$$", "$"))
    return words


def read_environment(text):
    """An environment file as systemd takes it apart: double quotes, four characters that a backslash unescapes."""
    out = {}
    for line in text.splitlines():
        name, value = line.split("=", 1)
        assert value[0] == '"'
        assert value[-1] == '"'
        out[name] = re.sub(r'\\(["\\$`])', r"\1", value[1:-1])
    return out


@pytest.mark.parametrize("word", HOSTILE)
def test_words_arrive(word):
    assert read_exec(backend.quote_word(word)) == [word]


def test_a_command_line_arrives():
    assert read_exec(" ".join(backend.quote_word(word) for word in HOSTILE)) == HOSTILE


@pytest.mark.parametrize("value", HOSTILE)
def test_values_arrive(value):
    assert read_environment(backend.environment_file({"X": value})) == {"X": value}


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "a\0b"])
def test_what_a_line_cannot_hold_is_refused(value):
    with pytest.raises(CleanslateError):
        backend.quote_value(value)


def test_bytes_that_are_no_text_are_refused():
    with pytest.raises(CleanslateError, match="UTF-8"):
        backend.quote_word("\udcff")


ACCOUNT = Account("sglang", 990, 990, "/srv/100% home", False)


def unit(**more):
    argv = ["/opt/sglang/bin/python", "-m", "sglang.launch_server", "--model-path", "/srv/m"]
    return backend.unit_text("main", argv, paths("/var/lib/cleanslate", "main"), ACCOUNT, more.get("stop", 120.0))


def test_the_unit():
    text = unit()
    assert 'ExecStart="/opt/sglang/bin/python" "-m" "sglang.launch_server" "--model-path" "/srv/m"' in text
    for line in (
        "Type=exec",
        "KillMode=mixed",
        "TimeoutStopSec=120",
        "StartLimitBurst=3",
        "EnvironmentFile=/var/lib/cleanslate/servers/main/environment",
        "WorkingDirectory=-/srv/100%% home",
        "User=sglang",
        "PrivateTmp=yes",
    ):
        assert line in text.splitlines()


class Started(backend.Systemd):
    """A unit that was started and whose main process has this pid."""

    def __init__(self, pid):
        self.pid = pid

    def run(self, *words, timeout=0.0):
        return "MainPID=%d\nControlGroup=/system.slice/x\nInvocationID=abc\nActiveState=active\n" % self.pid


class OnePid(ProcFS):
    def pids(self):
        raise AssertionError("one process is asked for, not all")


@pytest.mark.parametrize("there", [True, False])
def test_only_the_started_process_is_looked_at(there):
    pid = os.getpid() if there else 4194304
    record = InstanceRecord(name="main", backend="systemd", unit="cleanslate-main.service")
    launch._start_unit(record, Started(pid), reload=False, fs=OnePid())
    assert (record.pid, record.pgrp) == (pid, os.getpgid(0) if there else 0)
    assert record.details["invocation"] == "abc"


def test_a_node_without_systemd_is_told_which_variable_to_change(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CleanslateError, match="sglang_server_backend: process"):
        backend.Systemd().run("systemctl", "--version")
