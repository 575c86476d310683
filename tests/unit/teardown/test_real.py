# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whole teardowns of real processes on stand-in GPUs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.proc.table import ProcFS, ancestors
from ansible_collections.cleanslate.inference.plugins.module_utils.state.lease import Lease, LeaseHeld

from ..proctree import FakeNvml, nvml_gpus
from .holders import HOLD, Holders, holders, pids_of, reasons_of, wait_for


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Holders]:
    with holders(tmp_path) as made:
        yield made


def test_a_matched_holder_ends_by_term(lab: Holders) -> None:
    scheduler = lab.start(title="sglang::scheduler_TP0", maps=[0])
    stranger = lab.start(title="trainer", maps=[1])
    result = lab.tear_down(scope="match")
    assert result["changed"]
    assert reasons_of(result["killed"]) == {scheduler.pid: "match"}
    assert result["killed"][0]["signal"] == "TERM"
    assert scheduler.wait(20) == -signal.SIGTERM
    assert stranger.poll() is None
    assert reasons_of(result["spared"]) == {stranger.pid: "foreign_holder"}
    assert result["simulated"] is True


def test_a_second_run_changes_nothing(lab: Holders) -> None:
    lab.start(title="sglang::scheduler", maps=[0])
    lab.tear_down(scope="match")
    again = lab.tear_down(scope="match")
    assert (again["changed"], again["killed"], again["spared"]) == (False, [], [])
    assert again["msg"] == "Nothing to end; 0 spared."


def test_check_mode_shows_the_same_list_and_signals_nobody(lab: Holders) -> None:
    one = lab.start(title="sglang::scheduler_TP0", maps=[0])
    two = lab.start(title="sglang::scheduler_TP1", maps=[1])
    planned = lab.tear_down(check=True, scope="match")
    assert planned["changed"]
    assert planned["killed"][0]["start_time"] > 0
    assert one.poll() is None
    assert two.poll() is None
    assert not (lab.folder / "run").exists()
    done = lab.tear_down(scope="match")
    assert pids_of(done["killed"]) == pids_of(planned["killed"]) == {one.pid, two.pid}


def test_who_ignores_term_is_killed_after_the_grace(lab: Holders) -> None:
    stubborn = lab.start(title="sglang::scheduler", maps=[0], extra="signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    result = lab.tear_down(scope="match", term_timeout=0.5)
    assert stubborn.wait(20) == -signal.SIGKILL
    assert result["killed"][0]["signal"] == "KILL"
    assert 0.5 <= result["killed"][0]["seconds"] < 5


def test_who_takes_its_time_gets_no_kill_and_nobody_waits_longer(lab: Holders) -> None:
    slow = lab.start(
        title="sglang::scheduler",
        maps=[0],
        extra="signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), os._exit(7)))",
    )
    result = lab.tear_down(scope="match", term_timeout=10)
    assert slow.wait(20) == 7
    assert result["killed"][0]["signal"] == "TERM"
    assert 0.9 < result["elapsed"] < 4


def test_a_stopped_process_is_continued(lab: Holders) -> None:
    stopped = lab.start(title="sglang::scheduler", maps=[0])
    os.kill(stopped.pid, signal.SIGSTOP)
    result = lab.tear_down(scope="match")
    assert stopped.wait(20) == -signal.SIGTERM
    assert result["killed"][0]["signal"] == "TERM"
    assert result["elapsed"] < 5


def test_all_ends_every_unprotected_holder(lab: Holders) -> None:
    one = lab.start(title="trainer", maps=[0])
    kept = lab.start(title="exporter", maps=[1])
    result = lab.tear_down(scope="all", protect=["exporter"])
    assert reasons_of(result["killed"]) == {one.pid: "holder"}
    assert reasons_of(result["spared"]) == {kept.pid: "protected"}
    assert kept.poll() is None


# -- holders that other tools do not see --------------------------------------------------------------------------


FORK = """
child = os.fork()
if child:
    print("child %d" % child, flush=True)
    while True:
        signal.pause()
"""


def heir_of(lab: Holders, holder: subprocess.Popen[bytes]) -> int:
    """The child of a holder that runs FORK; parent and child speak in any order."""
    (told,) = {lab.line(holder), lab.line(holder)} - {b"ready"}
    heir = int(told.split()[1])
    lab.orphans.add(heir)
    return heir


def test_the_heir_of_a_dead_holder_is_ended_and_nobody_nvml_names(lab: Holders) -> None:
    holder = lab.start(title="trainer", opens=[0], extra=FORK, lines=0)
    heir = heir_of(lab, holder)
    holder.kill()
    holder.wait(20)
    lab.nvml = FakeNvml(nvml_gpus(4))
    lab.nvml.set(0, used=4622, processes=[(holder.pid, 4614)])
    result = lab.tear_down(scope="all")
    assert pids_of(result["killed"]) == {heir}
    assert not alive(heir)


LEADERLESS = """
import ctypes, platform, threading
threading.Thread(target=lambda: time.sleep(600), daemon=True).start()
print("ready", flush=True)
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""


def test_a_thread_without_its_leader_is_a_holder(lab: Holders) -> None:
    holder = lab.start(title="trainer", opens=[0], extra=LEADERLESS)
    wait_for(lambda: state_of(holder.pid) == "Z")
    assert os.listdir("/proc/%d/task" % holder.pid) != [str(holder.pid)]
    result = lab.tear_down(scope="all")
    assert pids_of(result["killed"]) == {holder.pid}
    assert holder.wait(20) == -signal.SIGTERM


def test_a_plain_zombie_is_neither_ended_nor_waited_for(lab: Holders) -> None:
    zombie = lab.start(title="sglang::scheduler", maps=[0])
    zombie.kill()
    wait_for(lambda: state_of(zombie.pid) == "Z")
    result = lab.tear_down(scope="all", term_timeout=5)
    assert (result["changed"], result["killed"], result["spared"]) == (False, [], [])
    assert result["elapsed"] < 2


def test_another_node_a_deleted_node_and_an_unrelated_file(lab: Holders) -> None:
    twin, doomed, unrelated = (lab.folder / name / "nvidia0" for name in ("twin", "doomed", "unrelated"))
    for path in (twin, doomed, unrelated):
        path.parent.mkdir()
    os.link(lab.node(0), twin)
    os.link(lab.node(0), doomed)
    unrelated.write_bytes(b"\0" * 4096)
    opened = "opened.append(os.open(%r, os.O_RDWR))"
    first = lab.start(title="one", extra=opened % str(twin))
    second = lab.start(title="two", extra=opened % str(doomed))
    third = lab.start(title="three", extra=opened % str(unrelated))
    doomed.unlink()
    result = lab.tear_down(scope="all")
    assert pids_of(result["killed"]) == {first.pid, second.pid}
    assert third.poll() is None


def test_a_neighbour_with_every_node_open_lives(lab: Holders) -> None:
    target = lab.start(title="sglang::scheduler", maps=[0], environ={"CUDA_VISIBLE_DEVICES": "0"})
    neighbour = lab.start(title="sglang::scheduler", maps=[3], opens=[0, 1, 2], environ={"CUDA_VISIBLE_DEVICES": "3"})
    lab.nvml = FakeNvml(nvml_gpus(4))
    for scope in ("match", "all"):
        result = lab.tear_down(scope=scope, devices=["0"])
        assert neighbour.poll() is None
        assert reasons_of(result["spared"])[neighbour.pid] == "neighbour"
    assert target.wait(20) == -signal.SIGTERM


# -- names ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with a module sglang.launch_server that holds what it is told."""
    folder = tmp_path / "package"
    (folder / "sglang").mkdir(parents=True)
    (folder / "sglang/__init__.py").touch()
    (folder / "sglang/launch_server.py").write_text(HOLD % "", encoding="utf-8")
    return folder


NAME_ITSELF = """
import ctypes
ctypes.CDLL(None).prctl(15, b"sglang.launch_server", 0, 0, 0)
"""


def run_driver(lab: Holders, *words: str, **params: Any) -> tuple[int, dict[str, Any], subprocess.Popen[str]]:
    """A teardown from a shell, as over ssh: wrapper, tool and all have the pattern in their command lines."""
    order = json.dumps({"params": lab.params(**params), "pids": "PIDS"})
    script = 'exec 3<&0; wrapper=$$; set -- "$@"; "$@"; code=$?; : sglang.launch_server; exit $code'
    driver = str(Path(__file__).with_name("driver.py"))
    # The tool looks at the holders and at itself and everything above it.
    mine = [os.getpid(), *ancestors(ProcFS().processes(), os.getpid())]
    order = order.replace('"PIDS"', json.dumps([*lab.pids(), *mine]))
    shell = subprocess.Popen(
        ["sh", "-c", script, "sglang.launch_server", sys.executable, driver, order, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    output, _errors = shell.communicate(timeout=60)
    return shell.returncode, json.loads(output), shell


def test_the_pattern_in_every_command_line(lab: Holders, package: Path) -> None:
    target = lab.start([sys.executable, "-m", "sglang.launch_server"], maps=[0], cwd=package)
    renamed = lab.start(title="python3", maps=[1], extra=NAME_ITSELF)
    log = lab.folder / "sglang.launch_server.log"
    log.touch()
    editor = subprocess.Popen(["vim", "-f", str(log)], executable=shutil.which("tail"), stdout=subprocess.DEVNULL)
    lab.started.append(editor)
    code, result, _shell = run_driver(lab, "-m", "sglang.launch_server", scope="match")
    assert code == 0, result
    assert pids_of(result["killed"]) == {target.pid, renamed.pid}
    assert editor.poll() is None
    code, result, _shell = run_driver(lab, "-m", "sglang.launch_server", scope="match")
    assert (code, result["changed"]) == (0, False)


def test_holders_above_the_tool_are_never_ended(lab: Holders) -> None:
    """The tool's own parents hold the GPU, under the scope that takes every holder."""
    with open(lab.node(0), "r+b") as held:
        os.set_inheritable(held.fileno(), True)
        other = lab.start(title="trainer", maps=[0])
        code, result, shell = run_driver(lab, scope="all")
    assert (code, shell.returncode) == (0, 0)
    assert pids_of(result["killed"]) == {other.pid}


# -- ports ----------------------------------------------------------------------------------------------------------


SERVE = """
import socket
server = socket.socket()
server.bind(("127.0.0.1", 0))
server.listen()
print(server.getsockname()[1], flush=True)
"""


def test_an_orphan_that_inherited_the_port(lab: Holders) -> None:
    """The server is dead; a worker of its process group still listens and holds nothing."""
    main = lab.start(title="sglang::server", maps=[0], group=True, extra=SERVE + FORK, lines=0)
    port = int(lab.line(main))
    orphan = heir_of(lab, main)
    main.kill()
    main.wait(20)
    result = lab.tear_down(scope="match", ports=[port])
    assert pids_of(result["killed"]) == {orphan}
    assert result["ports"][0]["listeners"] == [{"address": "127.0.0.1", "pids": [orphan]}]


def test_a_strangers_port_is_left_under_match_and_taken_under_all(lab: Holders) -> None:
    stranger = lab.start(title="website", extra=SERVE, lines=0)
    port = int(lab.line(stranger))
    lab.line(stranger, b"ready")
    result = lab.tear_down(scope="match", ports=[port])
    assert reasons_of(result["spared"]) == {stranger.pid: "port_busy"}
    assert stranger.poll() is None
    result = lab.tear_down(scope="all", ports=[port])
    assert reasons_of(result["killed"]) == {stranger.pid: "listener"}


# -- who reads the result -----------------------------------------------------------------------------------------


MARK = """
def marked(*_):
    print("TERM", flush=True)
signal.signal(signal.SIGTERM, marked)
"""


def start_driver(lab: Holders, through: list[str]) -> subprocess.Popen[bytes]:
    order = {"params": lab.params(scope="match", term_timeout=2.0), "pids": lab.pids()}
    driver = str(Path(__file__).with_name("driver.py"))
    return subprocess.Popen(
        [*through, sys.executable, driver, json.dumps(order)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )


def test_a_reader_that_goes_stops_it_before_the_next_signal(lab: Holders) -> None:
    target = lab.start(title="sglang::scheduler", maps=[0], extra=MARK)
    driver = start_driver(lab, [])
    lab.line(target, b"TERM")
    assert driver.stdout is not None
    driver.stdout.close()
    assert driver.wait(20) != 0
    with pytest.raises(subprocess.TimeoutExpired):
        target.wait(1.5)


def test_a_parent_that_goes_stops_it_before_the_next_signal(lab: Holders) -> None:
    target = lab.start(title="sglang::scheduler", maps=[0], extra=MARK)
    # The shell stands for sshd's: it ends, and the tool under it goes on with its output still open.
    shell = start_driver(lab, ["sh", "-c", '"$@"; exit 0', "sh"])
    lab.line(target, b"TERM")
    shell.kill()
    shell.wait(20)
    assert shell.stdout is not None
    report = json.loads(shell.stdout.read())
    shell.stdout.close()
    assert report["failed"]
    assert "signals nothing further" in report["msg"]
    with pytest.raises(subprocess.TimeoutExpired):
        target.wait(1.5)


# -- those that come again ----------------------------------------------------------------------------------------


HYDRA = """
def again(*_):
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGTERM, again)
"""


def test_a_successor_forked_on_term_is_caught(lab: Holders) -> None:
    first = lab.start(title="sglang::scheduler", maps=[0], extra=HYDRA, group=True)
    result = lab.tear_down(scope="match")
    assert first.wait(20) == 0
    killed = pids_of(result["killed"])
    assert first.pid in killed
    assert len(killed) == 2
    assert not any(alive(pid) for pid in killed)


def test_a_shell_loop_is_named_with_its_stop_command(lab: Holders) -> None:
    loop = lab.folder / "run-forever.sh"
    loop.write_text('while :; do "$@"; done\n', encoding="utf-8")
    holder = ["bash", "-c", 'exec -a "$0" "$@"', "sglang::scheduler", sys.executable, "-c", HOLD % ""]
    shell = subprocess.Popen(
        ["bash", str(loop), *holder, lab.node(0), ""], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    lab.started.append(shell)
    lab.line(shell, b"ready")
    with pytest.raises(CleanslateError) as caught:
        lab.tear_down(scope="match")
    assert caught.value.details["reason"] == "respawned"
    assert "kill %d" % shell.pid in caught.value.message
    assert "run-forever.sh" in caught.value.message
    assert shell.poll() is None
    row = caught.value.details["survivors"][0]
    assert (row["reason"], row["stop_command"]) == ("respawned", "kill %d" % shell.pid)


# -- the node -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", [False, True])
def test_another_runs_lease_refuses_it(lab: Holders, check: bool) -> None:
    target = lab.start(title="sglang::scheduler", maps=[0])
    with Lease(str(lab.folder / "run"), "eve@elsewhere:1").held():
        pass
    with pytest.raises(LeaseHeld, match="eve@elsewhere:1"):
        lab.tear_down(check=check, scope="match", lease="bob@here:2")
    assert target.poll() is None
    done = lab.tear_down(scope="match", lease="eve@elsewhere:1")
    assert pids_of(done["killed"]) == {target.pid}


def test_a_run_keeps_its_lease_and_a_single_call_does_not(lab: Holders) -> None:
    lab.tear_down(scope="match", lease="bob@here:2")
    held = Lease(str(lab.folder / "run")).current()
    assert held is not None
    assert held.run == "bob@here:2"
    Lease(str(lab.folder / "run"), "bob@here:2").release()
    lab.tear_down(scope="match")
    assert Lease(str(lab.folder / "run")).current() is None


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"scope": "everything"}, "scope"),
        ({"scope": "all", "devices": ["99"]}, "devices"),
        ({"scope": "match", "match": ["*"]}, "match"),
        ({"scope": "match", "match": ["1"]}, "match"),
        ({"scope": "all", "containers": ["404"]}, "containers"),
        ({"scope": "all", "users": ["nobody-of-this-name"]}, "users"),
        ({"scope": "all", "term_timeout": 60.0}, "kill_timeout"),
        ({"scope": "all", "ports": [70000]}, "ports"),
    ],
)
def test_bad_input_is_named_before_anything_is_signalled(lab: Holders, params: dict[str, Any], word: str) -> None:
    target = lab.start(title="sglang::scheduler", maps=[0])
    for check in (True, False):
        with pytest.raises(CleanslateError) as caught:
            lab.tear_down(check=check, **params)
        assert caught.value.message.startswith(word + ":")
    assert target.poll() is None


def state_of(pid: int) -> str:
    return Path("/proc/%d/stat" % pid).read_bytes().rpartition(b")")[2].split()[0].decode()


def alive(pid: int) -> bool:
    """Whether it lives: a zombie that nobody has reaped yet does not."""
    try:
        return state_of(pid) not in "ZX"
    except OSError:
        return False
