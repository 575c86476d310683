# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Check mode does nothing: everybody lives."""

from __future__ import annotations

from look import Machine

testinfra_hosts = ["lab://gpu_nodes"]


def test_lives(machine: Machine) -> None:
    assert machine.planted("worker")
    assert machine.planted("stranger")
