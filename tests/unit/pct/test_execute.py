# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Containers brought into states and their commands run, on a hypervisor made of words with a clock of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.pct.conf import parse_conf
from ansible_collections.cleanslate.inference.plugins.module_utils.pct.enter import PctProblem, Ran, Whereabouts
from ansible_collections.cleanslate.inference.plugins.module_utils.pct.execute import Executor, Options
from ansible_collections.cleanslate.inference.plugins.module_utils.pct.program import Ended
from ansible_collections.cleanslate.inference.plugins.module_utils.pct.wanted import Command, Wanted

from ..proctree import FakeClock

CONFS = {
    129: "hostname: llm\n",
    130: "hostname: embed\nlock: backup\n",
    131: "",
    900: "hostname: golden\ntemplate: 1\n",
}


class FakeMachine:
    """129 and 130 run, 131 does not; 201 is on pve2, 700 is a virtual machine. Every call of pct is kept."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.running = {129, 130}
        self.confs = dict(CONFS)
        self.calls: list[tuple[str, ...]] = []
        self.attached: list[tuple[int, Command, bool]] = []
        #: What happens in place of a call of pct that begins with this word.
        self.instead: dict[str, Callable[[int], Ended]] = {}
        self.answers: dict[str, Ran | PctProblem] = {}
        #: At this time of the clock, something happens.
        self.later: list[tuple[float, Callable[[], None]]] = []

    def check(self) -> None:
        pass

    def _tick(self) -> None:
        for when, what in list(self.later):
            if self.clock.now() >= when:
                self.later.remove((when, what))
                what()

    def find(self, vmid: int) -> Whereabouts:
        self._tick()
        if vmid in self.confs:
            return Whereabouts("here", "pve1", parse_conf(self.confs[vmid]))
        if vmid == 201:
            return Whereabouts("elsewhere", "pve2", parse_conf("hostname: far\n"))
        return Whereabouts("vm", "pve2") if vmid == 700 else Whereabouts("missing")

    def runs(self, vmid: int) -> bool:
        self._tick()
        return vmid in self.running

    def pct(self, words: Any, stdin: bytes = b"", timeout: float = 600.0) -> Ended:
        self.calls.append(tuple(words))
        verb, vmid = words[0], int(words[1])
        if verb in self.instead:
            return self.instead[verb](vmid)
        if verb == "start":
            self.running.add(vmid)
        if verb == "shutdown":
            self.running.discard(vmid)
        return Ended(0)

    def attach(self, vmid: int, command: Command, look: bool = False) -> Ran:
        if "systemctl is-system-running" in command.argv[-1]:
            answer = self.answers.get("boot", Ran(0, "", "running\n", "", False))
        else:
            self.attached.append((vmid, command, look))
            answer = self.answers.get(command.argv[0], Ran(None, "would", "", "", False) if look else OK)
        if isinstance(answer, PctProblem):
            raise answer
        return answer


OK = Ran(0, "", "out\n", "", False)


class Reader:
    def __init__(self) -> None:
        self.gone_after = 10**6
        self.checks = 0

    def check(self) -> None:
        self.checks += 1
        if self.checks > self.gone_after:
            raise CleanslateError("gone")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def machine(clock: FakeClock) -> FakeMachine:
    return FakeMachine(clock)


def do(machine: FakeMachine, *wanted: Wanted, check_mode: bool = False, **options: Any) -> list[dict[str, Any]]:
    executor = Executor(machine, Options(**options), Reader(), check_mode, machine.clock)  # type: ignore[arg-type]
    result = executor.run(wanted)
    assert result["changed"] == any(row["changed"] for row in result["containers"])
    assert result["failed"] == any(row["failed"] for row in result["containers"])
    assert len(result["diff"]) == sum(row["changed"] for row in result["containers"])
    return result["containers"]


def want(vmid: int, state: str = "running", *commands: Command) -> Wanted:
    return Wanted(vmid, state, commands)


@pytest.mark.parametrize(
    ("vmid", "state", "calls", "status"),
    [
        (129, "running", [], "running"),
        (131, "running", ["start"], "running"),
        (129, "stopped", ["shutdown"], "stopped"),
        (131, "stopped", [], "stopped"),
        (129, "restarted", ["shutdown", "start"], "running"),
        (131, "restarted", ["start"], "running"),
        (129, "unchanged", [], "running"),
        (131, "unchanged", [], "stopped"),
        (130, "running", [], "running"),
    ],
)
@pytest.mark.parametrize("check_mode", [False, True])
def test_states(machine: FakeMachine, vmid: int, state: str, calls: list[str], status: str, check_mode: bool) -> None:
    before = set(machine.running)
    (row,) = do(machine, want(vmid, state), check_mode=check_mode)
    assert not row["failed"]
    assert row["status_before"] == ("running" if vmid in before else "stopped")
    assert (row["status"], row["changed"]) == (status, bool(calls))
    assert [call[0] for call in machine.calls] == ([] if check_mode else calls)
    if check_mode:
        assert machine.running == before
    elif state != "restarted":
        # The second run changes nothing.
        assert not do(machine, want(vmid, state))[0]["changed"]


def test_a_start_waits_for_the_boot(machine: FakeMachine, clock: FakeClock) -> None:
    machine.answers["boot"] = Ran(1, "", "starting\n", "", False)
    machine.later.append((105.0, lambda: machine.answers.update(boot=Ran(0, "", "degraded\n", "", False))))
    machine.instead["start"] = lambda vmid: (machine.running.add(vmid), Ended(0))[1]

    def attach(vmid: int, command: Command, look: bool = False, attach: Any = machine.attach) -> Ran:
        machine._tick()
        return attach(vmid, command, look)

    machine.attach = attach  # type: ignore[method-assign]
    (row,) = do(machine, want(131, "running", Command(("true",))))
    assert not row["failed"]
    assert 5 <= clock.now() - 100 < 7
    # Pauses grow, and never past a second.
    assert clock.pauses[0] == pytest.approx(0.1)
    assert max(clock.pauses) <= 1.0


def test_a_start_that_never_gets_there(machine: FakeMachine, clock: FakeClock) -> None:
    machine.answers["boot"] = Ran(1, "", "starting\n", "", False)
    (row,) = do(machine, want(131, "running", Command(("true",))), start_timeout=20.0)
    assert (row["code"], row["changed"]) == ("start_timeout", True)
    assert "not up within 20 s (option start_timeout); systemctl says: starting" in row["msg"]
    assert clock.now() - 100 == pytest.approx(20, abs=1.1)
    assert machine.attached == []


def test_a_start_that_need_not_wait(machine: FakeMachine) -> None:
    machine.answers["boot"] = PctProblem("no_shell", "it has no /bin/sh")
    assert not do(machine, want(131), wait_for="running")[0]["failed"]
    assert do(machine, want(129, "restarted"))[0]["code"] == "no_shell"


def test_a_start_that_fails(machine: FakeMachine) -> None:
    text = b"Device /dev/nvidia0 does not exist\n"
    machine.instead["start"] = lambda vmid: Ended(255, b"", text)
    (row,) = do(machine, want(131))
    assert (row["code"], row["status"], row["changed"]) == ("missing_device", "stopped", False)


def test_a_restart_that_ends_half_way(machine: FakeMachine) -> None:
    machine.instead["start"] = lambda vmid: Ended(255, b"", b"startup for container '129' failed\n")
    (row,) = do(machine, want(129, "restarted"))
    assert (row["code"], row["status"], row["changed"]) == ("start_failed", "stopped", True)


def test_a_start_whose_log_is_on_stdout(machine: FakeMachine) -> None:
    machine.instead["start"] = lambda vmid: Ended(255, b"No such file\n", b"startup for container '131' failed\n")
    (row,) = do(machine, want(131))
    assert row["code"] == "start_failed"
    assert "did not start: startup for container '131' failed" in row["msg"]
    assert "No such file" in row["msg"]


def test_a_container_that_ends_at_once(machine: FakeMachine) -> None:
    machine.instead["start"] = lambda vmid: Ended(0)
    assert do(machine, want(131), start_timeout=2.0)[0]["code"] == "start_failed"


def test_somebody_else_was_faster(machine: FakeMachine) -> None:
    def start(vmid: int) -> Ended:
        machine.running.add(vmid)
        return Ended(255, b"", b"CT 131 already running\n")

    def shutdown(vmid: int) -> Ended:
        machine.running.discard(vmid)
        return Ended(255, b"", b"CT 131 not running\n")

    machine.instead.update(start=start, shutdown=shutdown)
    assert not do(machine, want(131))[0]["failed"]
    assert not do(machine, want(131, "stopped"))[0]["failed"]


def test_a_container_that_does_not_shut_down(machine: FakeMachine) -> None:
    machine.instead["shutdown"] = lambda vmid: Ended(255, b"", b"container did not stop\n")
    (row,) = do(machine, want(129, "stopped"), stop_timeout=5.0)
    assert (row["code"], row["status"]) == ("stop_failed", "running")
    assert row["msg"] == "it did not stop: container did not stop; force_stop: true ends it by force"
    assert machine.calls == [("shutdown", "129", "--timeout", "5")]


def test_force(machine: FakeMachine) -> None:
    do(machine, want(129, "stopped"), stop_timeout=5.0, force_stop=True)
    assert machine.calls == [("shutdown", "129", "--timeout", "5", "--forceStop", "1")]


@pytest.mark.parametrize(
    ("vmid", "code", "says"),
    [
        (999, "missing", "there is no container 999 in this cluster"),
        (201, "elsewhere", "it is on node pve2"),
        (700, "not_a_container", "700 is a virtual machine (on node pve2)"),
        (900, "template", "never runs"),
    ],
)
def test_what_cannot_be_done_is_told_apart(machine: FakeMachine, vmid: int, code: str, says: str) -> None:
    """And all others are done."""
    rows = do(machine, want(vmid), want(131))
    assert (rows[0]["code"], rows[0]["failed"], rows[0]["changed"]) == (code, True, False)
    assert says in rows[0]["msg"]
    assert (rows[1]["failed"], rows[1]["status"]) == (False, "running")


def test_elsewhere_may_be_passed_over(machine: FakeMachine) -> None:
    (row,) = do(machine, want(201, "running", Command(("true",))), elsewhere="skip")
    assert (row["skipped"], row["failed"], row["node"], row["code"]) == (True, False, "pve2", "elsewhere")
    assert machine.attached == []


def test_a_migration_while_it_is_done(machine: FakeMachine) -> None:
    """pct says only that the configuration is not here: the answer says where it is."""

    def start(vmid: int) -> Ended:
        machine.find = lambda vmid: Whereabouts("elsewhere", "pve3")  # type: ignore[method-assign]
        return Ended(2, b"", b"Configuration file 'nodes/pve1/lxc/131.conf' does not exist\n")

    machine.instead["start"] = start
    (row,) = do(machine, want(131))
    assert (row["code"], row["msg"]) == ("elsewhere", "it is on node pve3: run this there")


def test_a_lock_stops_a_change_of_state_but_no_command(machine: FakeMachine) -> None:
    assert not do(machine, want(130, "running", Command(("true",))))[0]["failed"]
    (row,) = do(machine, want(130, "stopped"))
    assert (row["code"], row["changed"]) == ("locked", False)
    assert "locked (backup)" in row["msg"]
    assert machine.calls == []


def test_waiting_for_a_lock(machine: FakeMachine, clock: FakeClock) -> None:
    machine.later.append((107.0, lambda: machine.confs.update({130: "hostname: embed\n"})))
    (row,) = do(machine, want(130, "stopped"), lock_timeout=30.0)
    assert not row["failed"]
    assert 7 <= clock.now() - 100 < 9
    # In check mode nobody waits.
    machine.confs[130] = CONFS[130]
    machine.running.add(130)
    now = clock.now()
    assert do(machine, want(130, "stopped"), check_mode=True, lock_timeout=30.0)[0]["code"] == "locked"
    assert clock.now() == now


# -- commands ----------------------------------------------------------------------------------------------------------


def test_commands_in_order_until_one_fails(machine: FakeMachine) -> None:
    machine.answers["bad"] = Ran(3, "", "", "why\nbecause\n", False)
    commands = [Command(("first", "--api-key", "hunter2")), Command(("bad",)), Command(("never",))]
    (row,) = do(machine, want(129, "running", *commands))
    assert [call[1].argv[0] for call in machine.attached] == ["first", "bad"]
    assert (row["failed"], row["code"], row["msg"]) == (True, "command_failed", "bad ended with 3: because")
    assert row["changed"]
    assert row["commands"][0]["cmd"] == "first --api-key ********"
    assert (row["commands"][0]["rc"], row["commands"][0]["stdout"]) == (0, "out\n")


def test_codes_that_are_no_failure(machine: FakeMachine) -> None:
    machine.answers["grep"] = Ran(1, "", "", "", False)
    assert not do(machine, want(129, "running", Command(("grep",), ok_codes=(0, 1))))[0]["failed"]


def test_needless_commands(machine: FakeMachine) -> None:
    machine.answers["made"] = Ran(None, "creates", "", "", False)
    (row,) = do(machine, want(129, "running", Command(("made",), creates="/x"), Command(("read",), changed_when=False)))
    assert not row["changed"]
    assert [(line["skipped"], line["reason"]) for line in row["commands"]] == [(True, "creates"), (False, "")]


def test_commands_need_a_container_that_runs(machine: FakeMachine) -> None:
    (row,) = do(machine, want(131, "unchanged", Command(("true",))))
    assert (row["code"], row["commands"]) == ("not_running", [])


def test_a_command_that_pct_fails_for(machine: FakeMachine) -> None:
    machine.answers["true"] = PctProblem("not_running", "it does not run")
    (row,) = do(machine, want(129, "running", Command(("true",))))
    assert (row["code"], row["msg"]) == ("not_running", "true: it does not run")


def test_check_mode_runs_nothing(machine: FakeMachine) -> None:
    """It only looks at creates and removes, and only in containers that run."""
    machine.answers["made"] = Ran(None, "removes", "", "", False)
    commands = [
        Command(("plain",)),
        Command(("reads",), changed_when=False),
        Command(("made",), removes="/x"),
        Command(("makes",), creates="/y"),
    ]
    rows = do(machine, want(129, "running", *commands), want(131, "running", *commands), check_mode=True)
    assert all(look for _vmid, _command, look in machine.attached)
    assert [(vmid, command.argv[0]) for vmid, command, _look in machine.attached] == [(129, "made"), (129, "makes")]
    assert [line["changed"] for line in rows[0]["commands"]] == [True, False, False, True]
    assert [line["reason"] for line in rows[0]["commands"]] == ["check_mode", "check_mode", "removes", "check_mode"]
    assert [line["changed"] for line in rows[1]["commands"]] == [True, False, True, True]
    assert machine.calls == []


def test_check_mode_of_a_container_that_is_named_twice(machine: FakeMachine) -> None:
    rows = do(machine, want(131), want(131, "stopped"), want(131, "stopped"), check_mode=True)
    assert [(row["status_before"], row["status"]) for row in rows] == [
        ("stopped", "running"),
        ("running", "stopped"),
        ("stopped", "stopped"),
    ]


def test_nobody_reads_the_result_any_more(machine: FakeMachine) -> None:
    """What was begun ends; nothing further is begun."""
    reader = Reader()
    reader.gone_after = 2
    executor = Executor(machine, Options(), reader, clock=machine.clock)  # type: ignore[arg-type]
    with pytest.raises(CleanslateError, match="gone"):
        executor.run([want(129, "running", Command(("first",)), Command(("second",)))])
    assert [call[1].argv[0] for call in machine.attached] == ["first"]
