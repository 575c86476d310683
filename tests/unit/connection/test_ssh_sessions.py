# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Places on connections, and who makes them. Threads stand for Ansible's workers: a flock belongs to an opened file."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ansible_collections.cleanslate.inference.plugins.plugin_utils.ssh_sessions import AT_A_TIME, Hypervisor, answers
from ansible_collections.cleanslate.inference.plugins.plugin_utils.waiter import State, Waiter, machine, myself


@pytest.fixture
def hypervisor(tmp_path_factory: pytest.TempPathFactory) -> Hypervisor:
    return Hypervisor(tmp_path_factory.mktemp("cp"), "key", 3)


@pytest.fixture
def masters() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def listen(masters: contextlib.ExitStack, path: Path) -> None:
    master = masters.enter_context(socket.socket(socket.AF_UNIX))
    master.bind(str(path))
    master.listen()


class Failure(Exception):
    pass


def test_the_first_free_place_is_taken(hypervisor: Hypervisor) -> None:
    with contextlib.ExitStack() as held:
        taken = [held.enter_context(hypervisor.place()).name for _ in range(7)]
    assert taken == ["key-0"] * 3 + ["key-1"] * 3 + ["key-2"]
    with hypervisor.place() as path:
        assert path.name == "key-0"


def test_a_place_is_free_again_after_an_error(hypervisor: Hypervisor) -> None:
    hypervisor.sessions = 1
    with pytest.raises(Failure), hypervisor.place():
        raise Failure
    with hypervisor.place() as path:
        assert path.name == "key-0"


def test_a_connection_is_made_once(hypervisor: Hypervisor, masters: contextlib.ExitStack) -> None:
    made = []

    def connect() -> None:
        made.append(threading.get_ident())
        listen(masters, hypervisor.socket(0))

    threads = [
        threading.Thread(target=hypervisor.connected, args=(hypervisor.socket(0), connect, Failure)) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(made) == 1


def test_few_connections_are_made_at_a_time(hypervisor: Hypervisor) -> None:
    now, most, lock = 0, 0, threading.Lock()
    all_in = threading.Barrier(AT_A_TIME)

    def connect() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        all_in.wait(10)  # passes only when as many as may are here
        with lock:
            now -= 1

    paths = [hypervisor.socket(number) for number in range(2 * AT_A_TIME)]
    threads = [threading.Thread(target=hypervisor.connected, args=(path, connect, Failure)) for path in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert most == AT_A_TIME


def test_who_waited_for_a_failure_fails_with_it(hypervisor: Hypervisor) -> None:
    tries, failures = [], []
    begun, go_on = threading.Event(), threading.Event()

    def connect() -> None:
        tries.append(1)
        begun.set()
        assert go_on.wait(10)
        raise Failure("No route to host")

    def run() -> None:
        try:
            hypervisor.connected(hypervisor.socket(0), connect, Failure)
        except Failure as error:
            failures.append(str(error))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert begun.wait(10)
    while sum(1 for _ in turns_open(hypervisor)) < len(threads):  # until all have asked
        threading.Event().wait(0.01)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert (len(tries), failures) == (1, ["No route to host"] * 4)
    with pytest.raises(Failure):  # who asks later tries again
        hypervisor.connected(hypervisor.socket(0), connect, Failure)
    assert len(tries) == 2


def turns_open(hypervisor: Hypervisor) -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if os.readlink(f"/proc/self/fd/{name}") == str(hypervisor.folder / "key.turn0"):
                yield name


def test_a_socket_that_was_left_behind_does_not_answer(hypervisor: Hypervisor, masters: contextlib.ExitStack) -> None:
    path = hypervisor.socket(0)
    listen(masters, path)
    assert answers(path)
    assert hypervisor.sockets() == [path]
    masters.close()
    assert path.exists()
    assert not answers(path)
    assert hypervisor.sockets() == []


def test_a_waiter_that_is_there() -> None:
    word = str(myself())
    assert " " not in word
    waiter = Waiter.read(word)
    assert waiter is not None
    assert waiter.state() is State.WAITS


def test_a_waiter_that_is_gone() -> None:
    me = myself()
    assert Waiter(me.node, machine(), me.pid, "1").state() is State.GONE  # the pid is another process's now
    with subprocess.Popen(["true"]) as child:
        child.wait(10)
    assert Waiter(me.node, machine(), child.pid, me.start).state() is State.GONE


def test_a_waiter_elsewhere() -> None:
    assert Waiter("ci", "00000000", 1, "1").state() is State.ELSEWHERE
    assert Waiter.read("no waiter") is None
