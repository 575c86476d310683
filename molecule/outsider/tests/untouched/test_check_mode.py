# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Check mode starts nothing."""

from __future__ import annotations

from testinfra.host import Host

testinfra_hosts = ["lab://ct101"]


def test_stays_stopped(host: Host) -> None:
    assert not host.service("cleanslate-chat").is_running
