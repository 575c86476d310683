# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tests that need a running lab: one hypervisor, a guest of each kind. Root only.

A lab that is up and fits is used and left up; otherwise one is started, and ended afterwards.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
LAB = HERE.parent / "lab"
sys.path.insert(0, str(HERE.parent))

from labkit import fleet  # noqa: E402
from labkit.client import Lab  # noqa: E402
from labkit.place import Place  # noqa: E402

WANTED = set(fleet.FIRST_KINDS)


def fits(place: Place) -> bool:
    hosts = fleet.load_fleet(place.fleet_file)
    return place.has_network() and bool(hosts) and {guest.kind for guest in hosts[0].guests} >= WANTED


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    place = Place()
    ours = not fits(place)
    if ours:
        # test_sglang_cpu.py needs what sglang_cpu/build makes; the other tests do not.
        real = ["--sglang"] if (place.folder / "sglang" / ".done").exists() else []
        subprocess.run([str(LAB), "up", "1", "6", "8", *real], check=True, timeout=300)
    with tempfile.TemporaryDirectory(prefix="cslab-") as sockets:
        made = Lab(sockets)
        try:
            yield made
        finally:
            made.close()
            if ours:
                subprocess.run([str(LAB), "down"], check=True, timeout=60)
