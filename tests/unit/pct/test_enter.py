# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The way into a container: real shells behind a pct that enters nothing; what the failures of the real one mean."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.pct.enter import (
    Machine,
    PctProblem,
    Ran,
    explain,
)
from ansible_collections.cleanslate.inference.plugins.module_utils.pct.program import Ended
from ansible_collections.cleanslate.inference.plugins.module_utils.pct.wanted import Command

from .conftest import Hypervisor

# exec ID -- WORDS: as in the container of this id.
PCT = """#!/bin/sh
[ "$1 $2 $3" = "exec 129 --" ] || { echo "unexpected: $*" >&2; exit 99; }
shift 3
exec "$@"
"""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    pct = tmp_path / "pct"
    pct.write_text(PCT, encoding="utf-8")
    pct.chmod(0o755)
    return Machine(program=str(pct))


def run(machine: Machine, *argv: str, look: bool = False, **more: Any) -> Ran:
    return machine.attach(129, Command(argv, **more), look=look)


def test_words_arrive_as_they_are(machine: Machine) -> None:
    words = ["a b", "$HOME", "`id`", "$(id)", "it's", '"', "", "*", "\\n", "-n", "a\nb", "ü", ";", "&&"]
    ran = run(machine, "printf", "%s|", *words)
    assert (ran.code, ran.stdout, ran.stderr) == (0, "".join(f"{word}|" for word in words), "")


@pytest.mark.parametrize("code", [0, 1, 2, 126, 127, 254, 255])
def test_every_code_is_the_command_s_own(machine: Machine, code: int) -> None:
    ran = run(machine, "sh", "-c", f"echo out; printf err >&2; exit {code}")
    assert (ran.code, ran.stdout, ran.stderr) == (code, "out\n", "err")


def test_a_command_that_a_signal_ends(machine: Machine) -> None:
    assert run(machine, "sh", "-c", "kill -9 $$").code == 137


def test_no_such_command(machine: Machine) -> None:
    assert run(machine, "/nosuch").code == 127


def test_stdin_and_folder(machine: Machine, tmp_path: Path) -> None:
    ran = run(machine, "sh", "-c", "pwd; cat", chdir=str(tmp_path), stdin="hello\n")
    assert ran.stdout == f"{tmp_path}\nhello\n"


def test_a_folder_that_is_not_there(machine: Machine, tmp_path: Path) -> None:
    with pytest.raises(PctProblem) as caught:
        run(machine, "touch", str(tmp_path / "ran"), chdir="/no such")
    assert (caught.value.code, caught.value.message) == ("no_folder", "the container has no folder /no such")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("kind", ["file", "dangling"])
def test_creates_and_removes(machine: Machine, tmp_path: Path, look: bool, kind: str) -> None:
    there, ran = tmp_path / "there it is", tmp_path / "ran"
    there.symlink_to("/nosuch") if kind == "dangling" else there.touch()
    touch = ("touch", str(ran))
    assert run(machine, *touch, creates=str(there), look=look).skipped == "creates"
    assert run(machine, *touch, removes="/nosuch", look=look).skipped == "removes"
    # Counted from the folder that it runs in.
    assert run(machine, *touch, creates=there.name, chdir=str(tmp_path), look=look).skipped == "creates"
    assert not ran.exists()
    assert run(machine, *touch, removes=str(there), creates="/nosuch", look=look).skipped == ("would" if look else "")
    assert ran.exists() is not look


def test_a_command_that_takes_too_long(machine: Machine) -> None:
    with pytest.raises(PctProblem) as caught:
        run(machine, "sleep", "60", timeout=0.2)
    assert (caught.value.code, caught.value.message) == ("command_timeout", "it did not end within 0.2 s and was ended")


def test_a_command_cannot_forge_its_end(machine: Machine) -> None:
    """The token is new in every run."""
    ran = run(machine, "sh", "-c", "echo cleanslate-0000000000000000 0 >&2; exit 3")
    assert ran.code == 3
    assert "cleanslate-0000000000000000 0" in ran.stderr


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        ("CT is locked (backup)", "locked", "locked (backup)"),
        ("Device /dev/nvidia0 does not exist", "missing_device", "the host has no /dev/nvidia0"),
        ("ipcc_send_rec[1] failed: Unknown error -1\nUnable to load access control list", "not_root", "become root"),
        ("container '131' not running!", "not_running", "does not run"),
        ("CT 131 not running", "not_running", "does not run"),
        ("Configuration file 'nodes/pve1/lxc/999.conf' does not exist", "missing", "not on this node"),
        (
            'lxc-attach: 129: ../src/lxc/attach.c: 1841 No such file or directory - Failed to exec "/bin/sh"',
            "no_shell",
            "no /bin/sh",
        ),
        ("startup for container '130' failed", "error", "startup for container '130' failed"),
        ("", "error", "pct ended with 255 and said nothing"),
    ],
)
def test_what_the_failures_of_pct_mean(text: str, code: str, says: str) -> None:
    problem = explain(Ended(255, b"", text.encode()), 131)
    assert problem.code == code
    assert says in problem.message


def test_a_guest_that_stops_while_a_command_runs(tmp_path: Path) -> None:
    pct = tmp_path / "pct"
    pct.write_text("#!/bin/sh\necho half; exit 137\n", encoding="utf-8")
    pct.chmod(0o755)
    with pytest.raises(PctProblem) as caught:
        run(Machine(program=str(pct)), "true")
    assert (caught.value.code, caught.value.message) == ("error", "half")


def test_no_pct() -> None:
    with pytest.raises(CleanslateError, match="no pct"):
        Machine(program="/nosuch/pct").pct(["list"])


def test_where_containers_are(hypervisor: Hypervisor) -> None:
    machine = Machine(hypervisor.place)
    hypervisor.write("etc/pve/nodes/pve2/qemu-server/700.conf", "name: win\n")
    assert [(machine.find(vmid).kind, machine.find(vmid).node) for vmid in (129, 201, 700, 999)] == [
        ("here", "pve1"),
        ("elsewhere", "pve2"),
        ("vm", "pve2"),
        ("missing", ""),
    ]
    assert [vmid for vmid in (129, 130, 131) if machine.runs(vmid)] == [129, 131]


def test_not_a_proxmox_node(tmp_path: Path) -> None:
    from ansible_collections.cleanslate.inference.plugins.module_utils.pct.host import Place

    with pytest.raises(CleanslateError, match="no Proxmox VE node"):
        Machine(Place(str(tmp_path))).check()


def test_not_root(hypervisor: Hypervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CleanslateError, match="become root"):
        Machine(hypervisor.place).check()
