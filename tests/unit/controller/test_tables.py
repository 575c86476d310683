# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tables for people: aligned, and harmless whatever the processes call themselves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.cleanslate.inference.plugins.plugin_utils.tables import short_devices, table


@given(st.lists(st.lists(st.text(), min_size=3, max_size=3), max_size=5), st.integers(60, 200))
def test_nothing_unprintable_is_shown(rows: list[list[str]], width: int) -> None:
    for line in table(("a", "b", "why"), rows, width):
        assert line.isprintable()


def test_columns_line_up_and_the_last_one_wraps() -> None:
    lines = table(("node", "reason"), [("n1", "word " * 30), ("node-long", "x")], 80)
    assert lines[0].index("reason") == lines[-1].index("x")
    assert all(len(line) <= 80 for line in lines)
    assert sum(line.count("word") for line in lines) == 30


def test_empty_columns_are_left_out() -> None:
    assert "unit" not in table(("pid", "unit", "why"), [(1, "", "x")])[0]


@pytest.mark.parametrize(
    ("devices", "shown"),
    [
        ([], ""),
        (["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2", "/dev/nvidiactl"], "0-2"),
        (["nvidia7", "nvidia0", "nvidia10", "nvidia9"], "0,7,9-10"),
        (["/dev/nvidia-caps/nvidia-cap3", "/dev/nvidia-uvm"], "nvidia-cap3"),
    ],
)
def test_devices_are_shown_as_ranges(devices: list[str], shown: str) -> None:
    assert short_devices(devices) == shown
