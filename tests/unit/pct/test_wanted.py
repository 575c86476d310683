# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What pct_exec takes for its options, and how it says what is wrong with them."""

from __future__ import annotations

from typing import Any

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.pct.wanted import Command, Wanted, read_wanted


def read(containers: list[Any], **more: Any) -> list[Wanted]:
    return read_wanted({"state": "running", "commands": [], "timeout": 600.0, "containers": containers, **more})


def test_ids_alone_take_what_is_for_all() -> None:
    commands = [["true"], {"argv": ["sleep", 1], "timeout": "5", "ok_codes": [0, 3]}]
    expected = (Command(("true",)), Command(("sleep", "1"), timeout=5.0, ok_codes=(0, 3)))
    assert read([129, "130"], commands=commands, state="unchanged") == [
        Wanted(129, "unchanged", expected),
        Wanted(130, "unchanged", expected),
    ]


def test_their_own_goes_first() -> None:
    entry = {"vmid": 129, "state": "restarted", "commands": []}
    assert read([entry, {"vmid": 130}], commands=[["true"]]) == [
        Wanted(129, "restarted", ()),
        Wanted(130, "running", (Command(("true",)),)),
    ]


def test_a_stopped_container_leaves_out_what_is_for_all() -> None:
    assert read([{"vmid": 129, "state": "stopped"}], commands=[["true"]]) == [Wanted(129, "stopped", ())]


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (True, True),
        ("yes", True),
        ("False", False),
        (0, False),
        ("rc == 0", "rc == 0"),
        ("'x' in stdout", "'x' in stdout"),
    ],
)
def test_changed_when(given: Any, taken: Any) -> None:
    (wanted,) = read([129], commands=[{"argv": ["true"], "changed_when": given}])
    assert wanted.commands[0].changed_when is taken or wanted.commands[0].changed_when == taken


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("abc", "vmid: 'abc' is no container id"),
        (99, "vmid: 99 is no container id"),
        ("0129", "vmid: '0129' is no container id"),
        ("129\n", "is no container id"),
        (True, "vmid: True is no container id"),
        (None, "vmid: None is no container id"),
        ({"state": "running"}, "vmid: None is no container id"),
        ({"vmid": 129, "state": "up"}, "state: 'up' is none of running, stopped, restarted, unchanged"),
        ({"vmid": 129, "comands": []}, "'comands': there is no such key, only vmid, state, commands"),
        ({"vmid": 129, "commands": "ls -la"}, "containers[0].commands: is no list"),
        ({"vmid": 129, "commands": ["ls -la"]}, "commands[0]: argv: write a list of words"),
        ({"vmid": 129, "commands": [[]]}, "commands[0]: argv: write a list of words"),
        ({"vmid": 129, "commands": [[""]]}, "the first word is empty"),
        ({"vmid": 129, "commands": [["a", {}]]}, "argv: write a list of words"),
        ({"vmid": 129, "commands": [["a\0b"]]}, "no word may hold a NUL character"),
        ({"vmid": 129, "commands": [{"argv": ["a"], "creates": ["/x"]}]}, "creates: ['/x'] is no text"),
        ({"vmid": 129, "commands": [{"argv": ["a"], "timeout": 0}]}, "timeout: 0 is no number of seconds above 0"),
        ({"vmid": 129, "commands": [{"argv": ["a"], "timeout": "soon"}]}, "timeout: 'soon' is no number"),
        ({"vmid": 129, "commands": [{"argv": ["a"], "ok_codes": ["x"]}]}, "ok_codes: write a list of exit codes"),
        ({"vmid": 129, "commands": [{"cmd": "a"}]}, "'cmd': there is no such key"),
        ({"vmid": 129, "state": "stopped", "commands": [["a"]]}, "a stopped container runs no commands"),
    ],
)
def test_what_is_wrong_is_named(entry: Any, says: str) -> None:
    with pytest.raises(CleanslateError) as caught:
        read([entry])
    assert says in caught.value.message
    assert caught.value.message.startswith("containers[0]")


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(CleanslateError) as caught:
        read(["x", 129, {"vmid": 130, "state": "up"}], commands=["ls"])
    assert len(caught.value.details["problems"]) == 3
