# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Check mode starts nothing and runs nothing."""

from __future__ import annotations

from testinfra.host import Host

testinfra_hosts = ["lab://px1"]


def test_what_was_stopped_stays_stopped(host: Host) -> None:
    assert host.check_output("pct status 102") == "status: stopped"


def test_what_was_taken_stays_away(host: Host) -> None:
    assert host.run("pct exec 101 -- test -e %s", "/root/it's $HOME; all").rc == 1
