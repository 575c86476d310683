# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who listens on a port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ansible_collections.cleanslate.inference.plugins.module_utils.net.ports import (
    PortState,
    look_at_ports,
    parse_sockets,
)
from ansible_collections.cleanslate.inference.plugins.module_utils.proc.table import ProcFS

HEADER = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
LINE = "   0: %s:%04X %s:0000 %02X 00000000:00000000 00:00000000 00000000  1000        0 %d 1 0000000000000000 100 0\n"


def look(port: int, pids: list[int] | None = None) -> PortState:
    return look_at_ports(ProcFS(), [port], [os.getpid()] if pids is None else pids)[0]


def listener(
    address: str = "127.0.0.1", family: int = socket.AF_INET, port: int = 0, reuse: bool = False
) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    if reuse:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind((address, port))
    made.listen(8)
    return made


@pytest.fixture
def orphan() -> Iterator[tuple[int, int]]:
    """A process that inherited a listening socket whose parent has closed it: (port, pid)."""
    with listener() as server:
        child = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"],
            stdin=subprocess.PIPE,
            pass_fds=[server.fileno()],
        )
        port = server.getsockname()[1]
    try:
        yield port, child.pid
    finally:
        child.communicate(b"")


def test_a_listener_is_found_with_its_owner() -> None:
    with listener() as server:
        state = look(server.getsockname()[1])
    assert state.busy
    assert [(entry.address, entry.pids) for entry in state.listeners] == [("127.0.0.1", (os.getpid(),))]


def test_a_free_port_is_free() -> None:
    with listener() as server:
        port = server.getsockname()[1]
    assert look(port) == PortState(port, [], 0, 0)
    assert look(port).note == ""


def test_an_inherited_socket_belongs_to_the_heir(orphan: tuple[int, int]) -> None:
    port, pid = orphan
    state = look(port, [os.getpid(), pid])
    assert [entry.pids for entry in state.listeners] == [(pid,)]


def test_an_owner_out_of_sight_leaves_the_port_busy(orphan: tuple[int, int]) -> None:
    state = look(orphan[0], [])
    assert state.busy
    assert state.listeners[0].pids == ()


def test_two_listeners_with_reuseport_are_both_told() -> None:
    with listener(reuse=True) as first, listener(port=first.getsockname()[1], reuse=True):
        port = first.getsockname()[1]
        state = look(port)
        # What a bind test would have said: a third one listens beside them, and so does one on another address.
        with listener(port=port, reuse=True), listener("127.0.0.2", port=port):
            pass
    assert len(state.listeners) == 2
    assert (state.busy, state.note) == (True, "")


def test_ipv6() -> None:
    with listener("::1", socket.AF_INET6) as server:
        state = look(server.getsockname()[1])
    assert [entry.address for entry in state.listeners] == ["::1"]


def test_time_wait_is_named_and_not_busy() -> None:
    with listener() as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _peer = server.accept()
        # Who closes first keeps the memory: here the server's side.
        accepted.close()
        assert client.recv(1) == b""
        client.close()
    state = look(port)
    assert (state.busy, state.time_wait) == (False, 1)
    assert "SO_REUSEADDR" in state.note


def test_connections_that_outlive_the_listener_are_counted() -> None:
    with listener() as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _peer = server.accept()
    with client, accepted:
        state = look(port)
    assert (state.busy, state.connections) == (False, 1)


def test_no_ports_no_look(tmp_path: Path) -> None:
    assert look_at_ports(ProcFS(str(tmp_path / "nowhere")), []) == []


def test_a_thread_shows_what_its_exited_leader_hides(tmp_path: Path) -> None:
    net = tmp_path / "net"
    net.mkdir()
    (net / "tcp").write_text(HEADER + LINE % ("0100007F", 30000, "00000000", 0x0A, 4242), encoding="ascii")
    for folder in ("7/fd", "7/task/7/fd", "7/task/8/fd"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "7/task/8/fd/3").symlink_to("socket:[4242]")
    state = look_at_ports(ProcFS(str(tmp_path)), [30000])[0]
    assert state.listeners[0].pids == (7,)


def test_guests_of_a_hypervisor_have_tables_of_their_own(tmp_path: Path) -> None:
    for folder in ("net", "7/net", "7/fd", "7/ns"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "7/ns/net").symlink_to("net:[9]")
    (tmp_path / "7/net/tcp").write_text(HEADER + LINE % ("00000000", 30000, "00000000", 0x0A, 4242), encoding="ascii")
    (tmp_path / "7/fd/3").symlink_to("socket:[4242]")
    fs = ProcFS(str(tmp_path))
    assert not look_at_ports(fs, [30000])[0].busy
    assert look_at_ports(fs, [30000], namespace_of=[7])[0].listeners[0].pids == (7,)


def test_addresses_are_read_in_the_machines_byte_order() -> None:
    table = HEADER + LINE % ("0100007F", 80, "00000000", 0x0A, 1)
    six = HEADER + LINE % ("B80D0120000000000000000001000000", 443, "0" * 32, 0x0A, 2)
    assert [(entry.address, entry.port) for entry in parse_sockets(table)] == [("127.0.0.1", 80)]
    assert [(entry.address, entry.port) for entry in parse_sockets(six)] == [("2001:db8::1", 443)]


@given(some.text())
def test_no_text_breaks_the_parser(text: str) -> None:
    for entry in parse_sockets(HEADER + text):
        assert entry.port >= 0
