# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Check mode on broken nodes says what it would do, and does nothing."""

from __future__ import annotations

import pytest
from look import Machine, report

testinfra_hosts = ["lab://ct101"]


@pytest.mark.parametrize("name", ["orphan", "listener", "neighbour"])
def test_lives(machine: Machine, name: str) -> None:
    assert machine.planted(name)


def test_the_report_names_who_would_go(machine: Machine) -> None:
    row = report(machine.name)
    assert (row["outcome"], row["ok"]) == ("would launch", True)
    planted = [machine.planted(name) for name in ("orphan", "listener")]
    assert {ended["pid"] for ended in row["ended"]} == {process.inner_pid for process in planted if process}
