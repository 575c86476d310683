# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Check mode on a dirty host ends nobody."""

from __future__ import annotations

import pytest
from look import Machine

testinfra_hosts = ["lab://ct101", "lab://ct102", "lab://ct103"]


@pytest.mark.parametrize("name", ["worker", "detokenizer", "stopped-worker", "neighbour", "almost", "user-of-shm"])
def test_lives(machine: Machine, name: str) -> None:
    assert machine.planted(name)


def test_unit_serves(machine: Machine) -> None:
    assert machine.host.service("revived").is_running


def test_litter_lies(machine: Machine) -> None:
    assert machine.host.file("/dev/shm/sgl_shm_mq_999999_0a1b2c3d").exists
