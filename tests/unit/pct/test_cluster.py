# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A cluster out of one reading."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.cleanslate.inference.plugins.module_utils.pct.cluster import (
    Cluster,
    Guest,
    Node,
    parse_reading,
)


@pytest.fixture
def cluster(reading: str) -> Cluster:
    return parse_reading(reading)


def guest(cluster: Cluster, vmid: int) -> Guest:
    (found,) = [guest for guest in cluster.guests if guest.vmid == vmid]
    return found


def test_every_node_s_guests(cluster: Cluster) -> None:
    assert [(guest.vmid, guest.node, guest.name) for guest in cluster.guests] == [
        (129, "pve1", "llm"),
        (130, "pve1", "embed.example.net"),
        (131, "pve1", "CT131"),
        (201, "pve2", "llm"),
        (301, "pve3", "far"),
        (900, "pve1", "golden"),
    ]
    assert cluster.nodes == {
        "pve1": Node("pve1", "198.51.100.1", True, True),
        "pve2": Node("pve2", "198.51.100.2", True),
        "pve3": Node("pve3", "198.51.100.3", False),
    }
    assert not cluster.doubtful


def test_status(cluster: Cluster) -> None:
    """Of the node that was read by its sockets, of others as they said last; an offline node's word is no more true."""
    assert {guest.vmid: guest.status for guest in cluster.guests} == {
        129: "running",
        130: "stopped",
        131: "running",
        201: "running",
        301: "unknown",
        900: "stopped",
    }


def test_gpus_and_who_shares_them(cluster: Cluster) -> None:
    assert guest(cluster, 129).gpus == (0, 1)
    assert guest(cluster, 130).gpus == (1, 2)
    assert guest(cluster, 129).shared_with == (130,)
    assert guest(cluster, 130).shared_with == (129,)
    # The same number on another node is another GPU; a template never runs.
    assert guest(cluster, 201).shared_with == ()
    assert guest(cluster, 900).shared_with == ()


def test_pools(cluster: Cluster) -> None:
    assert {g.vmid: g.pool for g in cluster.guests if g.pool} == {129: "prod", 131: "lab/small", 201: "prod"}


def test_a_node_that_is_alone() -> None:
    """No members, no statistics: the name is the machine's, the state its sockets'."""
    reading = (
        "/etc/pve/nodes/px1/lxc/101.conf:hostname: a\n"
        '/etc/pve/.members:{\n/etc/pve/.members:"nodename": "px1"\n/etc/pve/.members:}\n'
        "/proc/net/unix:0: 2 0 10000 1 1 1 @/var/lib/lxc/101/command\n"
        "/proc/sys/kernel/hostname:px1.example.net\n"
    )
    cluster = parse_reading(reading)
    assert cluster.nodes == {"px1": Node("px1", "", None, True)}
    assert cluster.guests[0].status == "running"


def test_an_id_on_two_nodes_is_told(reading: str) -> None:
    cluster = parse_reading(reading + "/etc/pve/nodes/pve2/lxc/129.conf:hostname: llm\n")
    assert cluster.doubtful == {129: ("pve1", "pve2")}


def test_lines_of_a_file_cannot_pass_for_another_file(reading: str) -> None:
    """A note that looks like a line of a reading stays in its own file."""
    forged = "/etc/pve/nodes/pve1/lxc/131.conf:/etc/pve/nodes/pve1/lxc/666.conf:hostname: evil\n"
    assert 666 not in {guest.vmid for guest in parse_reading(reading + forged).guests}


PATHS = (
    "/etc/pve/nodes/n/lxc/100.conf",
    "/etc/pve/.members",
    "/etc/pve/.rrd",
    "/etc/pve/user.cfg",
    "/proc/net/unix",
    "",
)


@given(st.lists(st.tuples(st.sampled_from(PATHS), st.text(max_size=40)), max_size=12))
def test_whatever_a_reading_holds(lines: list[tuple[str, str]]) -> None:
    cluster = parse_reading("".join(f"{path}:{text}\n" for path, text in lines))
    for guest in cluster.guests:
        assert guest.node in cluster.nodes
        assert guest.status in ("running", "stopped", "unknown")
        assert guest.name
