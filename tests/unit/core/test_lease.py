# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One run at a time on a node, and never a node that is locked for good."""

from __future__ import annotations

import json
import os
import signal
import stat
import time
import typing as t
from pathlib import Path

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.state.files import Locked, locked
from ansible_collections.cleanslate.inference.plugins.module_utils.state.lease import LIFETIME, Lease, LeaseHeld

if t.TYPE_CHECKING:
    from .conftest import Children, FakeClock, Tree

ALICE, BOB = "alice@control:1", "bob@laptop:2"


class Node:
    """A run_dir, and the time since its machine was booted."""

    def __init__(self, folder: Path) -> None:
        self.dir = folder / "run"
        self.now = 5000.0

    def lease(self, run: str | None = None, **options: t.Any) -> Lease:
        return Lease(str(self.dir), run, boottime=lambda: self.now, **options)

    def take(self, run: str) -> None:
        with self.lease(run).held():
            pass

    @property
    def path(self) -> Path:
        return self.dir / "lease.json"

    @property
    def owner(self) -> str | None:
        current = self.lease().current()
        return current.run if current else None

    def edit(self, **changes: object) -> None:
        self.path.write_text(json.dumps({**json.loads(self.path.read_text()), **changes}))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


# -- one run ------------------------------------------------------------------------------------------------------


def test_a_fresh_node_is_free_and_stays_untouched_by_a_look(node: Node) -> None:
    assert node.lease().current() is None
    node.lease(ALICE).check()
    assert not node.lease(ALICE).release()
    assert not node.dir.exists()


def test_a_run_keeps_its_lease_between_its_tasks(node: Node) -> None:
    node.take(ALICE)
    assert node.owner == ALICE
    node.lease(ALICE).check()
    node.take(ALICE)
    assert stat.S_IMODE(node.path.stat().st_mode) == 0o644
    assert stat.S_IMODE(node.dir.stat().st_mode) == 0o755


def test_each_task_renews_the_lease_at_its_start_and_its_end_and_since_stays(node: Node) -> None:
    node.take(ALICE)
    since = node.lease().current().since
    assert since == pytest.approx(time.time(), abs=60)
    node.now += 200
    with node.lease(ALICE).held():
        assert node.lease().current().left == LIFETIME
        node.now += 200
        assert node.lease().current().left == LIFETIME - 200
    assert node.lease().current() == (ALICE, since, LIFETIME)


def test_a_run_drops_its_own_lease_and_no_other_one(node: Node) -> None:
    node.take(ALICE)
    assert not node.lease(BOB).release()
    assert not node.lease().release()
    assert node.owner == ALICE
    assert node.lease(ALICE).release()
    assert not node.lease(ALICE).release()
    assert node.owner is None
    node.take(BOB)


def test_the_last_step_drops_the_lease_also_when_it_fails(node: Node) -> None:
    with node.lease(ALICE).held(release=True):
        assert node.owner == ALICE
    assert node.owner is None
    with pytest.raises(ZeroDivisionError), node.lease(ALICE).held(release=True):
        raise ZeroDivisionError
    assert node.owner is None
    with pytest.raises(ZeroDivisionError), node.lease(ALICE).held():
        raise ZeroDivisionError
    assert node.owner == ALICE


def test_a_lease_can_be_dropped_while_a_module_of_the_run_still_works(node: Node) -> None:
    with node.lease(ALICE).held():
        assert node.lease(ALICE).release()
        assert node.owner is None


# -- another run --------------------------------------------------------------------------------------------------


def test_another_run_is_told_who_and_since_when(node: Node) -> None:
    node.take("alice\x1b[31m@control:1")
    node.edit(since=1_700_000_000.0)
    node.now += 100
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(1_700_000_000))
    for other in (BOB, None):
        with pytest.raises(LeaseHeld, match=rf"alice.*since {day}.*200 s") as error:
            node.lease(other).check()
        assert error.value.message.isprintable()
        assert error.value.details == {"lease": {"run": r"alice\x1b[31m@control:1", "since": 1.7e9, "left": 200}}
        with pytest.raises(LeaseHeld, match="alice"), node.lease(other).held():
            pytest.fail("two runs on one node")


def test_a_lease_lapses_when_nobody_renews_it(node: Node) -> None:
    node.take(ALICE)
    node.now += LIFETIME - 1
    with pytest.raises(LeaseHeld):
        node.take(BOB)
    node.now += 1
    node.lease(BOB).check()
    node.take(BOB)
    assert node.owner == BOB
    with pytest.raises(LeaseHeld, match="bob"):
        node.take(ALICE)


def test_a_lease_ends_with_its_boot(node: Node, tree: Tree) -> None:
    with node.lease(ALICE, fs=tree.fs).held():
        pass
    assert node.lease(fs=tree.fs).current() is not None
    tree.boot("8d1bd1f1-0000-4000-8000-000000000002")
    node.now = 3.0
    assert node.lease(fs=tree.fs).current() is None
    with node.lease(BOB, fs=tree.fs).held():
        pass
    assert node.lease(fs=tree.fs).current().run == BOB


def test_a_jumping_wall_clock_neither_breaks_nor_prolongs_a_lease(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for wall in (0.0, 1e10):
        monkeypatch.setattr(time, "time", lambda wall=wall: wall)
        node.take(ALICE)
        monkeypatch.undo()
        with pytest.raises(LeaseHeld, match="300 s"):
            node.lease(BOB).check()
        node.now += LIFETIME
        assert node.owner is None


def test_a_lease_never_lives_longer_than_one_does_here(node: Node) -> None:
    with node.lease(ALICE, lifetime=1e9).held():
        pass
    assert node.lease().current().left == LIFETIME


# -- waiting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [-1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(node: Node, clock: FakeClock, timeout: float) -> None:
    with pytest.raises(CleanslateError, match=r"^lock_timeout: "), node.lease(BOB).held(timeout, clock=clock):
        pytest.fail("waited for ever, or not at all")


@pytest.mark.parametrize("timeout", [0.0, 0.1, 5.0])
def test_who_waits_in_vain_gives_up_in_time(node: Node, clock: FakeClock, timeout: float) -> None:
    node.take(ALICE)
    with pytest.raises(LeaseHeld, match="alice"), node.lease(BOB).held(timeout, clock=clock):
        pytest.fail("two runs on one node")
    assert sum(clock.pauses) == pytest.approx(max(0.0, timeout), abs=0.02)


def test_who_waits_is_let_in_when_the_other_run_is_done(node: Node, clock: FakeClock) -> None:
    node.take(ALICE)
    clock.on_pause = lambda: node.lease(ALICE).release() if len(clock.pauses) == 4 else None
    with node.lease(BOB).held(60.0, clock=clock):
        assert node.owner == BOB
        assert len(clock.pauses) == 4


def test_who_waits_for_a_lease_is_never_in_its_owner_s_way(node: Node, clock: FakeClock) -> None:
    node.take(ALICE)
    (node.dir / "lock").unlink()
    # Whoever so much as tries the lock makes its file anew.
    with pytest.raises(LeaseHeld), node.lease(BOB).held(5.0, clock=clock):
        pytest.fail("two runs on one node")
    assert not (node.dir / "lock").exists()


def test_a_lease_that_is_taken_while_one_waits_for_the_lock_counts(node: Node, clock: FakeClock) -> None:
    work = locked(str(node.dir / "lock"))
    node.dir.mkdir()
    work.__enter__()

    def other() -> None:
        if len(clock.pauses) == 2:
            work.__exit__(None, None, None)
            node.take(ALICE)

    clock.on_pause = other
    with pytest.raises(LeaseHeld, match="alice"), node.lease(BOB).held(3.0, clock=clock):
        pytest.fail("two runs on one node")
    assert sum(clock.pauses) == pytest.approx(3.0, abs=0.02)


def test_two_modules_of_one_run_do_not_work_at_once(node: Node, clock: FakeClock) -> None:
    with node.lease(ALICE).held():
        for timeout in (0.0, 1.0):
            with pytest.raises(LeaseHeld, match="Another module"), node.lease(ALICE).held(timeout, clock=clock):
                pytest.fail("two modules on one node")


@pytest.mark.parametrize("kind", [Locked, LeaseHeld, CleanslateError, KeyboardInterrupt])
def test_the_work_s_own_failure_comes_out_as_it_is(node: Node, clock: FakeClock, kind: type[BaseException]) -> None:
    failure = kind("of the work")
    begun = []

    def work() -> None:
        with node.lease(ALICE).held(60.0, clock=clock):
            begun.append(1)
            raise failure

    with pytest.raises(kind, match="of the work") as error:
        work()
    assert error.value is failure
    assert (begun, clock.pauses) == ([1], [])
    node.take(ALICE)


def test_a_lease_that_cannot_be_renewed_does_not_hide_the_work_s_own_failure(node: Node) -> None:
    def work(failure: type[Exception] | None) -> None:
        with node.lease(ALICE).held():
            node.path.unlink()
            node.path.mkdir()
            if failure:
                raise failure

    with pytest.raises(ZeroDivisionError):
        work(ZeroDivisionError)
    node.path.rmdir()
    with pytest.raises(CleanslateError, match=r"lease\.json"):
        work(None)


# -- a module on its own ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [None, ""])
def test_a_module_on_its_own_holds_the_node_while_it_works(node: Node, run: str | None) -> None:
    with node.lease(run).held():
        for other in (ALICE, None):
            with pytest.raises(LeaseHeld, match=rf"on its own \(pid {os.getpid()}\) is at work"):
                node.lease(other).check()
    assert node.owner is None
    assert not node.path.exists()
    with pytest.raises(ZeroDivisionError), node.lease(run).held():
        raise ZeroDivisionError
    assert not node.path.exists()


WORK = """
import sys
from ansible_collections.cleanslate.inference.plugins.module_utils.state.lease import Lease
with Lease(sys.argv[1], sys.argv[2] or None).held():
    print("go", flush=True)
    input()
"""


def test_two_processes_never_work_at_once(node: Node, children: Children) -> None:
    other = children.ready(WORK, str(node.dir), ALICE)
    with pytest.raises(LeaseHeld, match="alice"), Lease(str(node.dir), BOB).held():
        pytest.fail("two runs on one node")
    with pytest.raises(LeaseHeld, match="Another module"), Lease(str(node.dir), ALICE).held(0.15):
        pytest.fail("two modules on one node")
    other.communicate("\n")
    with pytest.raises(LeaseHeld, match="alice"):
        Lease(str(node.dir), BOB).check()
    with Lease(str(node.dir), ALICE).held(release=True):
        pass
    Lease(str(node.dir), BOB).check()


def test_a_killed_module_on_its_own_leaves_the_node_free(node: Node, children: Children) -> None:
    other = children.ready(WORK, str(node.dir), "")
    with pytest.raises(LeaseHeld, match=f"pid {other.pid}"):
        Lease(str(node.dir), BOB).check()
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert node.path.exists()
    with Lease(str(node.dir), BOB).held():
        pass


def test_a_killed_module_of_a_run_leaves_the_run_its_lease(node: Node, children: Children) -> None:
    other = children.ready(WORK, str(node.dir), ALICE)
    other.send_signal(signal.SIGKILL)
    other.wait()
    with pytest.raises(LeaseHeld, match="alice"):
        Lease(str(node.dir), BOB).check()
    with Lease(str(node.dir), ALICE).held():
        pass


def test_the_pid_of_a_killed_module_may_belong_to_another_process_now(node: Node) -> None:
    with node.lease().held():
        node.edit(start_time=1)
        assert node.owner is None


# -- what cannot be trusted ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff", b"[" * 200_000, b"{}", b'{"run": "x"}']
    + [
        json.dumps({"run": "x", "since": 1.0, "boot_id": "b", "expires": 9e9, **change}).encode()
        for change in (
            {"expires": "soon"},
            {"expires": None},
            {"expires": float("nan")},
            {"expires": float("inf")},
            {"since": 1e300},
            {"since": -1},
            {"since": []},
            {"pid": "x"},
            {"pid": 5},
        )
    ],
    ids=lambda content: content[-40:].decode("ascii", "replace"),
)
def test_a_damaged_lease_is_an_error_and_no_free_node(node: Node, content: bytes) -> None:
    node.take(ALICE)
    node.path.write_bytes(content)
    lease = node.lease(ALICE)
    for ask in (lease.current, lease.check, lease.release, lambda: node.take(BOB)):
        with pytest.raises(CleanslateError, match=r"lease\.json is damaged.*remove"):
            ask()


def test_a_planted_lease_is_refused(node: Node, foreign: t.Callable[[Path], None], tmp_path: Path) -> None:
    node.take(ALICE)
    node.path.rename(tmp_path / "elsewhere")
    node.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CleanslateError, match="symlink"):
        node.take(BOB)
    node.path.unlink()
    os.mkfifo(node.path)
    with pytest.raises(CleanslateError, match="no plain file"):
        node.take(BOB)
    node.path.unlink()
    node.take(ALICE)
    foreign(node.path)
    with pytest.raises(CleanslateError, match="belongs to user"):
        node.take(ALICE)


def test_a_planted_lock_is_refused(node: Node, tmp_path: Path) -> None:
    node.dir.mkdir()
    (node.dir / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(CleanslateError, match="lock is a symlink"):
        node.take(ALICE)
    assert not (tmp_path / "victim").exists()
    assert not node.path.exists()


def test_a_run_dir_of_another_user_is_refused(node: Node, foreign: t.Callable[[Path], None]) -> None:
    node.take(ALICE)
    foreign(node.dir)
    for ask in (node.lease(ALICE).current, node.lease(ALICE).release, lambda: node.take(ALICE)):
        with pytest.raises(CleanslateError, match=r"run_dir: .* belongs to user"):
            ask()


def test_a_run_dir_that_all_may_change_is_refused(node: Node) -> None:
    node.dir.mkdir()
    node.dir.chmod(0o777)
    with pytest.raises(CleanslateError, match=r"run_dir: .*chmod go-w"):
        node.take(ALICE)


def test_a_run_dir_that_cannot_be_made_is_named(node: Node) -> None:
    node.dir.write_bytes(b"")
    with pytest.raises(CleanslateError, match=r"run_dir: .*no folder"):
        node.take(ALICE)
