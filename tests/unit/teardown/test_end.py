# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is signalled, in which order, for how long, and what is said of those that stay."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.teardown.end import Limits
from ansible_collections.cleanslate.inference.plugins.module_utils.teardown.reader import ReaderGone

from ..proctree import ProcTree
from .fakes import CONT, KILL, TERM, FakeReader, Scene

SCHEDULER = ["sglang::scheduler"]


@pytest.fixture
def tree(tmp_path: Path) -> ProcTree:
    return ProcTree(tmp_path)


@pytest.fixture
def scene(tree: ProcTree) -> Scene:
    return Scene(tree)


def holder(scene: Scene, pid: int = 500, **process: Any) -> int:
    scene.tree.add(pid, **{"argv": SCHEDULER, "maps": [scene.tree.gpu(0)], **process})
    return pid


def test_term_is_enough_for_most(scene: Scene) -> None:
    holder(scene)
    outcome = scene.end()
    assert scene.kernel.sent == [(0.0, 500, TERM)]
    assert [(row["pid"], row["signal"], row["seconds"]) for row in outcome.killed] == [(500, "TERM", 0.1)]
    assert (outcome.changed, outcome.reason, outcome.survivors) == (True, "", [])
    assert outcome.elapsed == pytest.approx(0.1)


@pytest.mark.parametrize("ends", [False, True])
def test_a_living_parent_gets_the_moment_that_it_needs_and_a_dead_one_none(scene: Scene, ends: bool) -> None:
    scene.tree.add(400, comm="bash", argv=["bash", "run.sh"])
    holder(scene, 500, ppid=400)

    def zombie(pid: int) -> None:
        scene.tree.end(400)
        scene.tree.add(400, comm="bash", state="Z")

    if ends:
        scene.kernel.on_end = zombie
    elapsed = scene.end().elapsed
    assert elapsed == pytest.approx(0.1) if ends else 0.6 <= elapsed < 0.8


def test_who_goes_with_another_is_told_too(scene: Scene) -> None:
    """A worker that dies with its parent before its own turn (PR_SET_PDEATHSIG)."""
    holder(scene, 500)
    holder(scene, 501, ppid=500)
    scene.kernel.before_signal = lambda pid, number: scene.kernel.ends_at.setdefault(501, scene.clock.now())
    signal = scene.kernel.signal
    scene.kernel.signal = (  # type: ignore[method-assign]
        lambda handle, number: signal(handle, number) if handle.identity.pid == 500 or number == 0 else False
    )
    outcome = scene.end()
    assert {row["pid"]: row["signal"] for row in outcome.killed} == {500: "TERM", 501: ""}


def test_nothing_to_end_is_no_change(scene: Scene) -> None:
    outcome = scene.end()
    assert (outcome.changed, outcome.killed, outcome.elapsed) == (False, [], 0.0)


def test_who_traps_term_gets_no_kill_and_nobody_waits_for_the_grace(scene: Scene) -> None:
    scene.kernel.behave(holder(scene), TERM=1.0, KILL=0.0)
    outcome = scene.end(term=10)
    assert scene.kernel.signals_of(500) == [TERM]
    assert outcome.elapsed == pytest.approx(1.0)


def test_kill_after_the_grace(scene: Scene) -> None:
    scene.kernel.behave(holder(scene), KILL=0.2)
    outcome = scene.end(term=3)
    assert [(at, number) for at, _pid, number in scene.kernel.sent] == [(0.0, TERM), (3.0, KILL)]
    assert (outcome.killed[0]["signal"], outcome.killed[0]["seconds"]) == ("KILL", 3.2)


def test_no_grace_means_kill_at_once(scene: Scene) -> None:
    scene.kernel.behave(holder(scene), KILL=0.0)
    scene.end(term=0)
    assert scene.kernel.signals_of(500) == [KILL]


@pytest.mark.parametrize("state", ["D", "R"])
def test_what_never_ends_fails_within_the_time_with_all_that_is_known(scene: Scene, state: str) -> None:
    folder = scene.tree.add(500, argv=SCHEDULER, state=state, maps=[scene.tree.gpu(0)])
    (folder / "wchan").write_text("uvm_spin_loop", encoding="ascii")
    (folder / "stack").write_text("[<0>] uvm_spin_loop+0x1/0x2 [nvidia_uvm]\n", encoding="ascii")
    scene.kernel.behave(500)
    outcome = scene.end(term=2, kill=6)
    numbers = scene.kernel.signals_of(500)
    assert numbers[0] == TERM
    assert set(numbers[1:]) == {KILL}
    kills = [at for at, _pid, number in scene.kernel.sent if number == KILL]
    pauses = [later - sooner for sooner, later in itertools.pairwise(kills)]
    assert kills[0] == 2.0
    assert pauses == [0.5, 1.0, 2.0]
    assert 6.0 <= outcome.elapsed <= 8.0
    assert outcome.reason == "unkillable"
    row = outcome.survivors[0]
    assert (row["pid"], row["state"], row["wchan"], row["signal"]) == (500, state, "uvm_spin_loop", "KILL")
    assert "nvidia_uvm" in row["stack"]
    for word in ("500", "state %s" % state, "uvm_spin_loop", "reboot"):
        assert word in outcome.message


def test_one_that_stays_does_not_keep_the_others(scene: Scene) -> None:
    scene.kernel.behave(holder(scene, 500))
    holder(scene, 501)
    outcome = scene.end(term=1, kill=3)
    assert [row["pid"] for row in outcome.killed] == [501]
    assert [row["pid"] for row in outcome.survivors] == [500]
    assert scene.kernel.signals_of(501) == [TERM]


def test_a_stopped_process_is_continued_after_term(scene: Scene) -> None:
    holder(scene, state="T")
    scene.end()
    assert scene.kernel.signals_of(500) == [TERM, CONT]


def test_a_successor_of_the_same_pid_gets_nothing(scene: Scene) -> None:
    holder(scene, 900)
    plan = scene.plan
    first = plan("match")
    scene.tree.end(900)
    scene.tree.add(900, comm="sshd", argv=["sshd"], start_time=77777)
    scene.plan = lambda **options: first if options.get("memory") is None else plan(**options)  # type: ignore[method-assign]
    outcome = scene.end()
    assert scene.kernel.sent == []
    assert [(row["pid"], row["reason"]) for row in outcome.changed_identity] == [(900, "changed_identity")]
    assert outcome.changed is False


def test_who_ended_by_itself_before_is_no_change(scene: Scene) -> None:
    holder(scene)
    first = scene.plan("match")
    scene.tree.end(500)
    plan = scene.plan
    scene.plan = lambda **options: first if options.get("memory") is None else plan(**options)  # type: ignore[method-assign]
    outcome = scene.end()
    assert (scene.kernel.sent, outcome.changed, outcome.changed_identity) == ([], False, [])


def test_what_appears_meanwhile_is_caught(scene: Scene) -> None:
    holder(scene)

    def heir(pid: int) -> None:
        if pid == 500:
            holder(scene, 501, start_time=9000)

    scene.kernel.on_end = heir
    outcome = scene.end()
    assert [row["pid"] for row in outcome.killed] == [500, 501]
    assert outcome.reason == ""


def test_what_appears_while_another_resists_is_caught(scene: Scene) -> None:
    scene.kernel.behave(holder(scene, 500), KILL=5.0)

    def helper(pid: int, number: int) -> None:
        if (pid, number) == (500, TERM):
            holder(scene, 501, start_time=9000)

    scene.kernel.before_signal = helper
    outcome = scene.end(term=2, kill=30)
    assert {row["pid"] for row in outcome.killed} == {500, 501}
    assert scene.kernel.signals_of(501) == [TERM]


def test_a_restarter_is_named_with_the_command_that_stops_it(scene: Scene) -> None:
    scene.tree.add(400, comm="bash", argv=["bash", "run-forever.sh"])
    holder(scene, 500, ppid=400)

    def again(pid: int) -> None:
        if pid >= 500:
            holder(scene, pid + 1, ppid=400, start_time=9000 + pid)

    scene.kernel.on_end = again
    outcome = scene.end()
    assert outcome.reason == "respawned"
    assert outcome.survivors[0]["stop_command"] == "kill 400"
    assert "run-forever.sh" in outcome.survivors[0]["restarter"]
    assert "kill 400" in outcome.message
    assert scene.kernel.signals_of(400) == []
    assert outcome.elapsed < 10


def void(_made: int) -> None:
    pass


def later(scene: Scene, seconds: float, what: Any) -> None:
    """Something happens while the test's clock stands still for somebody who waits."""
    pause, due = scene.clock.pause, scene.clock.now() + seconds

    def passing(wait: float) -> None:
        pause(wait)
        if scene.clock.now() >= due and scene.clock.pause is passing:
            scene.clock.pause = pause  # type: ignore[method-assign]
            what()

    scene.clock.pause = passing  # type: ignore[method-assign]


def test_a_successor_that_takes_a_moment_and_holds_nothing_yet_is_caught(scene: Scene) -> None:
    scene.tree.add(400, comm="bash", argv=["bash", "run.sh"])
    words = ["python3", "serve.py"]
    scene.tree.add(500, argv=words, ppid=400, maps=[scene.tree.gpu(0)])
    later(scene, 0.3, lambda: scene.tree.add(501, argv=words, ppid=400, start_time=9000))
    outcome = scene.end(scope="all")
    assert [(row["pid"], row["reason"]) for row in outcome.killed] == [(500, "holder"), (501, "respawned")]


@pytest.mark.parametrize(
    "other",
    [
        {"argv": ["python3", "clean-up.py"]},
        {"ppid": 1},
        {"start_time": 1400},
        {"environ": {"CUDA_VISIBLE_DEVICES": "1"}},
    ],
    ids=["another command", "another parent", "older", "another GPU"],
)
def test_who_is_no_successor_lives(scene: Scene, other: dict[str, Any]) -> None:
    scene.tree.add(400, comm="bash", argv=["bash", "run.sh"])
    words = ["python3", "serve.py"]
    scene.tree.add(500, argv=words, ppid=400, maps=[scene.tree.gpu(0)])
    later(scene, 0.3, lambda: scene.tree.add(501, **{"argv": words, "ppid": 400, "start_time": 9000, **other}))
    scene.end(scope="all")
    assert scene.kernel.signalled == {500}


@pytest.mark.parametrize(
    ("comm", "argv", "waits"),
    [
        ("bash", ["-bash"], False),
        ("bash", ["bash", "-i"], False),
        ("zsh", ["zsh"], False),
        ("sshd", ["sshd: root@pts/0"], False),
        ("tmux: server", ["tmux", "new"], False),
        ("systemd", ["/usr/lib/systemd/systemd", "--user"], False),
        ("bash", ["bash", "run.sh"], True),
        ("sh", ["sh", "-c", "while :; do server; done"], True),
        ("python3", ["python3", "launch_all.py"], True),
        ("supervisord", ["supervisord"], True),
    ],
)
def test_only_a_parent_that_may_start_again_is_waited_for(
    scene: Scene, comm: str, argv: list[str], waits: bool
) -> None:
    scene.tree.add(400, comm=comm, argv=argv)
    holder(scene, 500, ppid=400)
    assert (scene.end().elapsed > 0.3) is waits


@pytest.mark.parametrize(
    ("comm", "argv", "command"),
    [
        ("supervisord", ["supervisord"], "supervisorctl stop PROGRAM (supervisorctl status names it)"),
        ("runsv", ["runsv", "sglang"], "sv down sglang"),
        ("s6-supervise", ["s6-supervise", "/run/s6/llm"], "s6-svc -d /run/s6/llm"),
        ("PM2 v5.3.0: God", ["PM2 v5.3.0: God Daemon"], "pm2 stop NAME (pm2 list names it)"),
        ("keeper", ["/opt/keeper"], "kill 400"),
    ],
)
def test_supervisors_are_known(scene: Scene, comm: str, argv: list[str], command: str) -> None:
    scene.tree.add(400, comm=comm, argv=argv)
    holder(scene, 500, ppid=400)
    scene.kernel.on_end = lambda pid: void(holder(scene, pid + 1, ppid=400, start_time=9000 + pid))
    assert scene.end().survivors[0]["stop_command"] == command


def test_a_unit_that_restarts_behind_another_main_process_is_named(scene: Scene) -> None:
    group = "/system.slice/wrapper.service"
    scene.tree.add(400, comm="sh", argv=["sh", "wrapper.sh"], cgroup=group)
    holder(scene, 500, ppid=400, cgroup=group)
    scene.systemd.unit("wrapper.service", main_pid=400, restart="always")
    scene.kernel.on_end = lambda pid: void(holder(scene, pid + 1, ppid=400, cgroup=group, start_time=9000 + pid))
    row = scene.end().survivors[0]
    assert row["stop_command"] == "systemctl --no-ask-password stop -- wrapper.service"


# -- units ------------------------------------------------------------------------------------------------------------


def service(scene: Scene, **state: Any) -> Any:
    group = "/system.slice/llm.service"
    holder(scene, 500, cgroup=group)
    scene.tree.add(501, comm="helper", cgroup=group, ppid=500)
    return scene.systemd.unit("llm.service", pids=[500, 501], main_pid=500, restart="always", **state)


def test_a_unit_is_stopped_before_anything_is_signalled(scene: Scene) -> None:
    key = service(scene)
    scene.systemd.seconds = 0.7
    outcome = scene.end()
    assert scene.systemd.stopped == [key]
    assert scene.kernel.sent == []
    assert outcome.stopped_units == ["llm.service"]
    assert {(row["pid"], row["signal"]) for row in outcome.killed} == {(500, "unit"), (501, "unit")}
    assert outcome.elapsed == pytest.approx(0.7, abs=0.1)


def test_a_unit_that_does_not_stop_in_time_is_killed(scene: Scene) -> None:
    service(scene)
    scene.systemd.seconds = 90.0
    scene.kernel.behave(500, KILL=0.0)
    scene.kernel.behave(501, KILL=0.0)
    outcome = scene.end(term=5)
    assert {number for _at, _pid, number in scene.kernel.sent} == {KILL}
    assert [at for at, _pid, _number in scene.kernel.sent] == pytest.approx([5.0, 5.0], abs=0.1)
    assert outcome.reason == ""


def test_what_a_unit_leaves_behind_is_signalled(scene: Scene) -> None:
    service(scene)
    scene.systemd.ends[next(iter(scene.systemd.ends))] = [500]
    outcome = scene.end()
    assert scene.kernel.signals_of(501) == [TERM]
    assert {row["pid"] for row in outcome.killed} == {500, 501}


def test_a_failing_stop_is_told_and_the_processes_are_signalled(scene: Scene) -> None:
    service(scene)
    scene.systemd.fails = "Access denied"
    outcome = scene.end()
    assert outcome.stopped_units == []
    assert any("Access denied" in warning for warning in outcome.warnings)
    assert scene.kernel.signals_of(500) == [TERM]
    assert {row["pid"] for row in outcome.killed} == {500, 501}


def test_a_unit_between_two_restarts_is_a_change(scene: Scene) -> None:
    scene.systemd.unit("llm.service", active="activating", sub="auto-restart", cgroup="")
    outcome = scene.end(scope="instances", units=["llm.service"])
    assert (outcome.stopped_units, outcome.changed) == (["llm.service"], True)


# -- before anything --------------------------------------------------------------------------------------------------


def test_without_the_right_to_signal_one_nobody_is_signalled(scene: Scene) -> None:
    holder(scene, 500)
    holder(scene, 501)
    scene.kernel.forbidden.add(501)
    with pytest.raises(CleanslateError, match="501"):
        scene.end()
    assert scene.kernel.sent == []


def test_an_error_half_way_tells_what_was_done(scene: Scene) -> None:
    holder(scene, 500)
    scene.kernel.forbidden.add(501)
    scene.kernel.on_end = lambda pid: void(holder(scene, 501, start_time=9000))
    with pytest.raises(CleanslateError) as caught:
        scene.end()
    assert [row["pid"] for row in caught.value.details["killed"]] == [500]
    assert caught.value.details["changed"] is True


@pytest.mark.parametrize("asked", range(6))
def test_without_a_reader_nothing_more_is_signalled(scene: Scene, asked: int) -> None:
    scene.kernel.behave(holder(scene, 500))
    scene.kernel.behave(holder(scene, 501))
    scene.reader = FakeReader(gone_after=asked)
    before: list[int] = []
    scene.kernel.before_signal = lambda pid, number: before.append(scene.reader.asked)
    with pytest.raises(ReaderGone):
        scene.end(term=1, kill=30)
    assert all(asks <= asked for asks in before)


@pytest.mark.parametrize(
    ("term", "kill", "option"),
    [
        (-1, 60, "term_timeout"),
        (float("nan"), 60, "term_timeout"),
        (float("inf"), 60, "term_timeout"),
        (10, 10, "kill_timeout"),
        (10, 0, "kill_timeout"),
        (10, -5, "kill_timeout"),
        (10, float("nan"), "kill_timeout"),
    ],
)
def test_senseless_times_are_refused_by_name(term: float, kill: float, option: str) -> None:
    with pytest.raises(CleanslateError) as caught:
        Limits(term, kill).check()
    assert caught.value.details == {"option": option}
    assert caught.value.message.startswith(option + ":")
