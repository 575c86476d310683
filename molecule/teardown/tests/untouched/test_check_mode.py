# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The fleet serves, and check mode of the teardown leaves it so."""

from __future__ import annotations

from look import Machine, get, report
from testinfra.host import Host

testinfra_hosts = ["lab://gpu_nodes"]


def test_serves_on(host: Host, machine: Machine) -> None:
    assert host.service("cleanslate-main").is_running
    assert get(host, 30000, "/model_info")[0] == 200
    assert machine.planted("neighbour")


def test_the_report_names_the_server(machine: Machine) -> None:
    row = report(machine.name)
    assert row["outcome"] == "would free"
    assert {ended["pid"] for ended in row["ended"]} == {process.inner_pid for process in machine.instance("main")}
    assert row["stopped_units"] == ["cleanslate-main.service"]
