# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Check mode places nothing."""

from __future__ import annotations

from testinfra.host import Host

testinfra_hosts = ["lab://gpu_nodes"]


def test_the_binding_is_not_placed(host: Host) -> None:
    assert not host.file("/var/lib/cleanslate/lib/pynvml.py").exists
