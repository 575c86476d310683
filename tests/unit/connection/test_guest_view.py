# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is said about a guest that could not be entered, from what the hypervisor tells."""

from __future__ import annotations

import shlex

import pytest

from ansible_collections.cleanslate.inference.plugins.plugin_utils.guest_entry import Cause, Outcome
from ansible_collections.cleanslate.inference.plugins.plugin_utils.guest_view import View, explain, hung, look, read

HERE = "at /etc/pve/nodes/px1/lxc/131.conf\nhere nodes/px1\n"


def outcome(cause: Cause) -> Outcome:
    return Outcome(None, b"", b"", "as pct says it", cause)


@pytest.mark.parametrize(
    ("cause", "text", "says"),
    [
        (Cause.STOPPED, HERE + "cgroup populated 0\n", "container 131 is not running (pct start 131)"),
        (Cause.STOPPED, HERE + "lock backup\n", "container 131 is not running and is locked (backup)"),
        (Cause.STOPPED, "at /etc/pve/nodes/px2/lxc/131.conf\nhere nodes/px1\n", "container 131 is on node px2, not on"),
        (Cause.ABSENT, "at /etc/pve/nodes/px2/lxc/131.conf\nhere nodes/px1\n", "set ansible_pct_host to px2"),
        (Cause.ABSENT, "at /etc/pve/nodes/px2/qemu-server/131.conf\nhere nodes/px1\n", "131 is a virtual machine (on"),
        (Cause.ABSENT, "here nodes/px1\n", "container 131 does not exist on node px1, nor on another node"),
        (Cause.ABSENT, "here \n", "as pct says it"),
        (Cause.ENDED, HERE + "cgroup populated 0\n", "container 131 stopped while the command ran (pct start 131)"),
        (Cause.ENDED, HERE + "lock migrate\ncgroup populated 0\n", "it is locked (migrate)"),
        (Cause.ENDED, HERE + "cgroup populated 1\n", "container 131 runs: the command's shell was killed"),
        (Cause.ENDED, "at /etc/pve/nodes/px2/lxc/131.conf\nhere nodes/px1\n", "went away while the command ran"),
        (Cause.OTHER, HERE, "as pct says it"),
    ],
)
def test_explanations(cause: Cause, text: str, says: str) -> None:
    assert says in explain("131", outcome(cause), read(text))


def test_all_that_a_hypervisor_says() -> None:
    text = HERE + "lock backup\ncgroup populated 1\ncgroup frozen 0\npct 4242 D\n"
    assert read(text) == View("px1", ("px1",), (), "backup", True, False, (4242, "D"))


def test_a_pct_that_hangs() -> None:
    assert "pct on px1 did not enter container 131 within 30 s (process 4242, state D)" in hung(
        "131", 30, View(here="px1", waiting=(4242, "D"))
    )


def test_a_sudo_that_allows_pct_alone_is_done_without() -> None:
    line = look("131", "token", sudo=True)
    words = shlex.split(line)
    assert words[:4] == ["sudo", "-n", "/bin/sh", "-c"]
    assert "||" in words
