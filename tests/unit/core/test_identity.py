# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Real processes and real pidfds: exactly the one that was meant, until it is gone for good."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import typing as t

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.proc.identity import (
    Handle,
    Identity,
    Kernel,
    require_kernel,
)
from ansible_collections.cleanslate.inference.plugins.module_utils.proc.table import Hidden, Process, ProcFS

if t.TYPE_CHECKING:
    from .conftest import Children, Tree

WAIT = "print('go', flush=True); input()"
LEADER_GONE = """
import ctypes, os, platform, threading
threading.Thread(target=threading.Event().wait).start()
print("go", flush=True)
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""


def identity_of(pid: int) -> Identity:
    return Identity(pid, ProcFS().process(pid).start_time)


def handle_of(pid: int) -> Handle:
    handle = Kernel().open(identity_of(pid))
    assert handle is not None
    return handle


def ended(handle: Handle, seconds: float = 0.0) -> bool:
    return Kernel().wait([handle], seconds) == [handle]


def test_a_signal_reaches_the_process_and_its_exit_is_seen(children: Children) -> None:
    child = children.ready(WAIT)
    with handle_of(child.pid) as handle:
        assert not ended(handle)
        assert Kernel().signal(handle, signal.SIGTERM)
        assert ended(handle, 10)
        assert child.wait() == -signal.SIGTERM
        assert not Kernel().signal(handle, signal.SIGTERM)
        assert ended(handle)
    assert handle.fd == -1
    handle.close()


def test_a_zombie_has_ended_though_nobody_reaped_it(children: Children) -> None:
    child = children.start("")
    with handle_of(child.pid) as handle:
        assert ended(handle, 10)
        assert ProcFS().process(child.pid).zombie
        assert ProcFS().find(child.pid) is None
    with handle_of(child.pid) as again:
        assert ended(again)
        assert Kernel().signal(again, signal.SIGKILL)  # to no effect


def test_a_process_without_its_main_thread_has_not_ended(children: Children) -> None:
    child = children.ready(LEADER_GONE)
    fs = ProcFS()
    while fs.process(child.pid).state != "Z":
        pass
    with handle_of(child.pid) as handle:
        assert not ended(handle, 0.05)
        assert fs.find(child.pid) is not None
        assert Kernel().signal(handle, signal.SIGKILL)
        assert ended(handle, 10)
        assert fs.find(child.pid) is None


def test_a_successor_with_the_same_pid_is_refused(children: Children) -> None:
    child = children.ready(WAIT)
    real = identity_of(child.pid)
    before = len(os.listdir("/proc/self/fd"))
    for other in (Identity(real.pid, real.start_time + 1), Identity(real.pid, real.start_time - 1)):
        assert Kernel().open(other) is None
        assert Kernel().look(other) is None
    assert Kernel().present(child.pid)
    assert Kernel().look(real) is not None
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_gone_or_no_process_gives_no_handle(children: Children) -> None:
    child = children.start("")
    gone = identity_of(child.pid)
    child.wait()
    # -1 would be everybody and 0 our own group for kill(2); 4294967295 is what drivers report.
    for identity in (gone, Identity(0, 0), Identity(-1, 0), Identity(4294967295, 0), Identity(2**70, 0)):
        assert Kernel().open(identity) is None
    assert Kernel().look(gone) is None
    assert not Kernel().present(gone.pid)


def test_a_thread_is_no_process(children: Children) -> None:
    code = "import threading as t; x = t.Thread(target=t.Event().wait, daemon=True); x.start(); " + WAIT
    child = children.ready(code)
    thread = next(tid for tid in ProcFS().tasks(child.pid) if tid != child.pid)
    assert Kernel().open(Identity(thread, ProcFS().process(child.pid).start_time)) is None


def test_waiting_returns_those_that_ended_and_no_others(children: Children) -> None:
    first, second, third = (children.ready(WAIT) for _ in range(3))
    handles = [handle_of(child.pid) for child in (first, second, third)]
    try:
        first.send_signal(signal.SIGKILL)
        third.send_signal(signal.SIGKILL)
        assert ended(handles[0], 10)
        assert ended(handles[2], 10)
        assert Kernel().wait(handles, 0) == [handles[0], handles[2]]
        assert Kernel().wait([handles[1]], -5) == []
    finally:
        for handle in handles:
            handle.close()


def test_a_closed_handle_does_not_pass_for_an_ended_process(children: Children) -> None:
    child = children.ready(WAIT)
    handle, number = handle_of(child.pid), 0
    number = handle.fd
    handle.close()
    with pytest.raises(ValueError, match=r"closed|negative"):
        Kernel().wait([handle], 0)
    with pytest.raises(ValueError, match="closed"):
        Kernel().wait([Handle(handle.identity, number)], 0)


def test_a_stopped_process_is_told_from_an_ended_one(children: Children) -> None:
    child = children.ready(WAIT)
    with handle_of(child.pid) as handle:
        Kernel().signal(handle, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        process = Kernel().look(handle.identity)
        assert process is not None
        assert process.state == "T"
        Kernel().signal(handle, signal.SIGTERM)
        assert not ended(handle, 0.05)
        Kernel().signal(handle, signal.SIGCONT)
        assert ended(handle, 10)


def test_the_first_process_is_never_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda _fd, number: sent.append(number))
    for pid in (1, 0, -1):
        with pytest.raises(CleanslateError, match="never"):
            Kernel().signal(Handle(Identity(pid, 0), -1), signal.SIGTERM)
    assert sent == []


def test_a_process_that_may_not_be_signalled_is_named(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_fd: int, _number: int) -> t.NoReturn:
        raise PermissionError(1, "Operation not permitted")

    child = children.ready(WAIT)
    with handle_of(child.pid) as handle:
        Kernel().may_signal(handle)
        monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
        for ask in (lambda: Kernel().signal(handle, signal.SIGTERM), lambda: Kernel().may_signal(handle)):
            with pytest.raises(CleanslateError, match=f"{child.pid}.*become") as error:
                ask()
            assert error.value.details == {"pid": child.pid}
    assert child.poll() is None


class Hiding(ProcFS):
    def process(self, pid: int) -> Process:
        raise Hidden(pid)


def test_a_hidden_process_is_not_reported_as_gone(children: Children) -> None:
    child = children.ready(WAIT)
    kernel = Kernel(Hiding())
    before = len(os.listdir("/proc/self/fd"))
    for ask in (kernel.open, kernel.look):
        with pytest.raises(CleanslateError, match="hidden"):
            ask(Identity(child.pid, 1))
    assert kernel.present(child.pid)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_whose_existence_is_denied_is_not_reported_as_gone(tree: Tree, children: Children) -> None:
    child = children.ready(WAIT)
    kernel = Kernel(tree.fs)  # shows nothing, as /proc with hidepid=2
    identity = identity_of(child.pid)
    with pytest.raises(CleanslateError, match="hidden"):
        kernel.open(identity)
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert kernel.open(identity) is None


def test_a_fixture_tree_gives_no_handle_of_a_real_process(tree: Tree, children: Children) -> None:
    child = children.ready(WAIT)
    tree.add(child.pid, start_time=1)
    assert Kernel(tree.fs).open(identity_of(child.pid)) is None


def test_old_kernels_are_refused_by_name() -> None:
    require_kernel()
    for release in ("5.3.0-generic", "6.18.1", "10.0", "unknown"):
        require_kernel(release)
    for release in ("5.2.21", "4.18.0-553.el8_10.x86_64", "3.10.0"):
        with pytest.raises(CleanslateError, match=release):
            require_kernel(release)


def test_interpreters_and_containers_without_pidfds_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int) -> t.NoReturn:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(CleanslateError, match="seccomp"):
        require_kernel()
    with pytest.raises(CleanslateError, match="cannot be watched"):
        Kernel().open(identity_of(os.getpid()))
    monkeypatch.delattr(os, "pidfd_open")
    with pytest.raises(CleanslateError, match=sys.executable):
        require_kernel()


def test_own_children_that_others_reap_are_no_error(children: Children) -> None:
    """Not only children can be waited for: what init adopted is watched as well."""
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60'], stdin=subprocess.DEVNULL,"
    parent = children.ready(code + " stdout=subprocess.DEVNULL); print(p.pid, flush=True)")
    orphan = int(children.said)
    parent.wait()
    with handle_of(orphan) as handle:
        Kernel().signal(handle, signal.SIGKILL)
        assert ended(handle, 10)
    assert isinstance(parent, subprocess.Popen)
