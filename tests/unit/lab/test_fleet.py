# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a fleet of the lab consists of, and its inventory; nothing is started."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

LABKIT = Path(__file__).resolve().parents[2] / "lab" / "labkit"


def part(name: str) -> ModuleType:
    """A module of the lab's, which is no part of the collection: imported by its place."""
    if "labkit" not in sys.modules:
        spec = importlib.util.spec_from_file_location("labkit", LABKIT / "__init__.py")
        assert spec is not None and spec.loader is not None
        sys.modules["labkit"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["labkit"])
    return importlib.import_module(f"labkit.{name}")


fleet, inventory, place = part("fleet"), part("inventory"), part("place")


def test_kinds_follow_from_the_position() -> None:
    (host,) = fleet.make_fleet(1, 10, 8)
    assert [guest.kind for guest in host.guests] == [
        *("privileged", "unprivileged", "passthrough", "stopped", "locked", "noname"),
        *("privileged", "unprivileged", "passthrough", "privileged"),
    ]
    assert [guest.unprivileged for guest in host.guests if guest.kind == "passthrough"] == [False, True]
    assert not host.guests[3].starts


def test_ids_and_addresses_are_unique_in_the_fleet() -> None:
    hosts = fleet.make_fleet(10, 10, 8)
    guests = [guest for host in hosts for guest in host.guests]
    assert len({guest.vmid for guest in guests}) == len({guest.address for guest in guests}) == 100
    assert not {guest.address for guest in guests} & {host.address for host in hosts}
    assert (guests[-1].vmid, guests[-1].address) == (1010, "10.99.10.110")


@pytest.mark.parametrize(
    ("guests", "gpus", "share", "expected"),
    [
        (1, 4, False, [(0, 1, 2, 3)]),
        (3, 8, False, [(0, 1), (2, 3), (4, 5)]),
        (4, 2, False, [(0,), (1,), (0,), (1,)]),
        (2, 0, False, [(), ()]),
        (2, 2, True, [(0, 1), (0, 1)]),
    ],
)
def test_gpus_are_dealt_out(guests: int, gpus: int, share: bool, expected: list[tuple[int, ...]]) -> None:
    (host,) = fleet.make_fleet(1, guests, gpus, share)
    assert [guest.gpus for guest in host.guests] == expected


@pytest.mark.parametrize(("hosts", "guests", "gpus"), [(0, 1, 1), (1, 100, 1), (21, 1, 1), (1, 1, -1)])
def test_sizes_that_cannot_be(hosts: int, guests: int, gpus: int) -> None:
    with pytest.raises(ValueError, match="hypervisors"):
        fleet.make_fleet(hosts, guests, gpus)


def test_a_fleet_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    hosts = fleet.make_fleet(2, 7, 3, sglang=True)
    fleet.save_fleet(hosts, tmp_path / "fleet.json")
    assert fleet.load_fleet(tmp_path / "fleet.json") == hosts
    assert fleet.load_fleet(tmp_path / "nothing") == []


def test_configurations_by_kind() -> None:
    (host,) = fleet.make_fleet(1, 6, 6)
    confs = {guest.kind: fleet.guest_conf(guest, host, [7, 10]) for guest in host.guests}
    assert "lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file\n" in confs["privileged"]
    assert "unprivileged: 1\n" in confs["unprivileged"]
    assert "dev0: /dev/nvidia2,gid=44\n" in confs["passthrough"]
    assert "dev/nvidia2 none bind" not in confs["passthrough"]
    assert "lock: backup\n" in confs["locked"]
    assert "hostname:" not in confs["noname"]
    assert "onboot: 0\n" in confs["stopped"]


def test_the_inventory(tmp_path: Path) -> None:
    hosts = fleet.make_fleet(2, 5, 4, sglang=True)
    made = inventory.inventory(place.Place(tmp_path / "a lab"), hosts)
    assert yaml.safe_load(inventory.yaml_of(made)) == made
    groups = made["all"]["children"]
    assert list(groups["hypervisors"]["hosts"]) == ["px1", "px2"]
    assert "ct104" not in groups["gpu_nodes"]["hosts"]
    assert list(groups["lab_stopped"]["hosts"]) == ["ct104", "ct204"]
    assert list(groups["lab_sglang"]["hosts"]) == ["ct101", "ct201"]
    assert groups["guests"]["hosts"]["ct201"]["ansible_pct_host"] == "10.99.2.1"


def test_names_differ_by_folder(tmp_path: Path) -> None:
    first, second = place.Place(tmp_path / "a"), place.Place(tmp_path / "b")
    assert first.name != second.name
    assert place.Place(tmp_path / "a").name == first.name
