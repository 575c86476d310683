# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Check mode on broken servers mends nothing."""

from __future__ import annotations

from look import Machine
from testinfra.host import Host

testinfra_hosts = ["lab://ct102"]


def test_what_was_stopped_stays_stopped(host: Host) -> None:
    assert host.service("cleanslate-left").is_running
    assert not host.service("cleanslate-right").is_running


def test_the_other_server_serves_on(host: Host, machine: Machine) -> None:
    (main,) = machine.running("left", "-m")
    assert main.inner_pid == int(host.file("/root/left").content_string)
