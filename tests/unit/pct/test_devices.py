# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Devices that a configuration hands over, and the rules that let the container use them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.cleanslate.inference.plugins.module_utils.pct.conf import parse_conf
from ansible_collections.cleanslate.inference.plugins.module_utils.pct.devices import Handed, handed, shared_gpus


def read(*lines: str) -> Handed:
    return handed(parse_conf("".join(line + "\n" for line in lines)))


def test_every_mount_entry_counts() -> None:
    given = read(
        "lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file",
        "lxc.mount.entry: /dev/nvidia11 dev/nvidia11 none bind,create=file 0 0",
        "lxc.mount.entry: /dev/nvidia-caps dev/nvidia-caps none bind,optional,create=dir",
        "lxc.mount.entry: /srv/models srv/models none bind",
        "lxc.mount.entry: proc proc proc defaults",
    )
    assert given.gpus == [0, 11]
    assert given.sources == ["/dev/nvidia0", "/dev/nvidia11", "/dev/nvidia-caps"]
    assert [device.optional for device in given.devices] == [True, False, True]
    assert not given.broken


def test_dev_lines_in_the_order_of_their_numbers() -> None:
    given = read("dev10: /dev/nvidia2", "dev2: path=/dev/nvidiactl,gid=44,mode=0666", "dev1: /dev/nvidia1,gid=44")
    assert [device.source for device in given.devices] == ["/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia2"]
    assert given.devices[1].options == {"gid": "44", "mode": "0666"}
    assert given.gpus == [1, 2]


def test_escaped_spaces_and_leading_slashes() -> None:
    given = read(
        "lxc.mount.entry: /dev/my\\040gpu dev/my\\040gpu none bind", "lxc.mount.entry: /dev/a /dev/a none bind"
    )
    assert given.devices[0].source == "/dev/my gpu"
    assert given.devices[0].target == "/dev/my gpu"
    assert [device.absolute for device in given.devices] == [False, True]


def test_what_means_nothing_is_told() -> None:
    given = read("dev0: gid=44", "dev1: /etc/passwd", "lxc.mount.entry: /dev/x", "lxc.cgroup2.devices.allow: c 195")
    assert [line for _index, line in given.broken] == [
        "dev0: gid=44",
        "dev1: /etc/passwd",
        "lxc.mount.entry: /dev/x",
        "lxc.cgroup2.devices.allow: c 195",
    ]


@pytest.mark.parametrize(
    ("lines", "allowed"),
    [
        ([], False),
        (["allow: c 195:* rwm"], True),
        (["allow: c 195:1 rw"], False),
        (["allow: c 195:0 r"], False),
        (["allow: b 195:* rwm"], False),
        (["allow: c *:* rwm"], True),
        (["allow: a"], True),
        (["allow: a *:* rwm"], True),
        (["allow: a", "deny: c 195:* w"], False),
        (["deny: a", "allow: c 195:* rwm"], True),
    ],
)
def test_rules(lines: list[str], allowed: bool) -> None:
    assert read(*(f"lxc.cgroup2.devices.{line}" for line in lines)).allowed("c", 195, 0) is allowed


def test_rules_of_cgroup_version_1_do_nothing() -> None:
    assert not read("lxc.cgroup.devices.allow: c 195:* rwm").allowed("c", 195, 0)


def test_a_hook_hands_out_gpus_by_itself() -> None:
    assert read("lxc.hook.mount: /usr/share/lxc/hooks/nvidia").hook


def test_sharing() -> None:
    assert shared_gpus({130: [1, 2], 129: [0, 1], 131: []}) == {1: [129, 130]}


@given(st.lists(st.text(max_size=40), max_size=8))
def test_whatever_the_lines_hold(texts: list[str]) -> None:
    lines = [key + text.replace("\n", " ") for text in texts for key in ("dev0: ", "lxc.mount.entry: ")]
    lines += ["lxc.cgroup2.devices.allow: " + text.replace("\n", " ") for text in texts]
    given = read(*lines)
    assert all(device.source.startswith("/dev/") for device in given.devices)
    assert all(device.target.startswith("/") for device in given.devices)
    # Only a rule for all devices, or for this number, can allow it.
    if given.allowed("c", 195, 0):
        assert any(rule.kind == "a" or rule.major in (None, 195) for rule in given.rules)
