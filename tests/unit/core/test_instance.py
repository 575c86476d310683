# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whose process is it? A wrong yes ends somebody else's work."""

from __future__ import annotations

import signal
import typing as t

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.proc.table import ProcFS
from ansible_collections.cleanslate.inference.plugins.module_utils.state.instance import (
    MARK,
    belongs,
    is_own_cgroup,
    marked,
    members,
    unrecorded_members,
)
from ansible_collections.cleanslate.inference.plugins.module_utils.state.record import InstanceRecord

if t.TYPE_CHECKING:
    from .conftest import Children, Tree

BOOT = "8d1bd1f1-0000-4000-8000-000000000001"
OTHER_BOOT = "8d1bd1f1-0000-4000-8000-000000000002"
UNIT = "/system.slice/cleanslate-a.service"
MARKED = b"PATH=/bin\0CLEANSLATE_INSTANCE=a\0"


def record(**changes: t.Any) -> InstanceRecord:
    values: dict[str, t.Any] = {"pid": 500, "start_time": 1000, "pgrp": 500, "boot_id": BOOT, "cgroup": UNIT}
    return InstanceRecord("a", "systemd", **{**values, **changes})


def pids(found: t.Iterable[t.Any]) -> list[int]:
    return sorted(process.pid for process in found)


# -- the cgroup ---------------------------------------------------------------------------------------------------


def test_who_is_in_the_recorded_cgroup_or_below_it_belongs(tree: Tree) -> None:
    tree.add(10, cgroup=f"0::{UNIT}\n")
    tree.add(11, cgroup=f"0::{UNIT}/worker\n")
    tree.add(12, cgroup=f"0::{UNIT}2\n")
    tree.add(13, cgroup="0::/system.slice\n")
    tree.add(14, cgroup="0::/\n")
    tree.add(15, cgroup="")
    tree.add(16, cgroup=f"1:name=systemd:{UNIT}\n0::/\n")
    table = tree.fs.processes().values()
    assert pids(members(table, record())) == [10, 11, 16]
    # The unit's cgroup means the instance in every boot.
    assert pids(members(table, record(boot_id=OTHER_BOOT, cgroup=UNIT + "/"))) == [10, 11, 16]
    assert pids(members(table, record(cgroup=""))) == []


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "",
        "//",
        "/init.scope",
        "/system.slice",
        "/system.slice/",
        "/user.slice/user-0.slice/session-3.scope",
        "/user.slice/user-0.slice/user@0.service",
        "/user.slice/user-0.slice/user@0.service/init.scope",
        "/user.slice/user-0.slice/user@0.service/app.slice",
        "/lxc/129",
        "/lxc/129/ns",
        "/lxc.payload.web",
        "/.lxc",
        "/docker/0123456789ab",
        "/system.slice/docker-0123456789ab.scope",
        "/machine.slice/libpod-0123456789ab.scope/container",
        "/kubepods/burstable/pod1/0123456789ab",
        "/kubepods.slice/kubepods-pod1.slice/cri-containerd-01.scope",
        "/../../system.slice/x.service",
        "system.slice/x.service",
    ],
)
def test_a_cgroup_that_many_share_makes_nobody_a_member(tree: Tree, path: str) -> None:
    assert not is_own_cgroup(path)
    tree.add(10, cgroup=f"0::{path}\n")
    tree.add(11, cgroup=f"0::{path}/x\n")
    assert members(tree.fs.processes().values(), record(cgroup=path)) == []


@pytest.mark.parametrize(
    "path",
    [
        UNIT,
        "/cleanslate/a",
        "/user.slice/user-1000.slice/user@1000.service/app.slice/cleanslate-a.service",
        "/lxc/129/system.slice/cleanslate-a.service",
        "/system.slice/cleanslate-a.scope",
    ],
)
def test_a_cgroup_of_its_own(path: str) -> None:
    assert is_own_cgroup(path)
    assert is_own_cgroup(path + "/")


# -- the mark -----------------------------------------------------------------------------------------------------


def test_who_carries_the_name_belongs_wherever_it_went(tree: Tree) -> None:
    tree.add(10, environ=MARKED, pgrp=10, cgroup="0::/elsewhere\n")
    tree.add(11, environ=b"CLEANSLATE_INSTANCE=ab\0")
    tree.add(12, environ=b"CLEANSLATE_INSTANCE=\0")
    tree.add(13, environ=b"X=CLEANSLATE_INSTANCE=a\0")
    tree.add(14, environ=b"CLEANSLATE_INSTANCE=b\0CLEANSLATE_INSTANCE=a\0")
    tree.add(15, environ=b"\0\0\0")
    (tree.root / "15/environ").unlink()  # may not be read
    tree.add(16, thread=17, environ=MARKED)  # its main thread is gone
    table = tree.fs.processes().values()
    assert pids(members(table, record(boot_id=OTHER_BOOT))) == [10, 16]
    assert [marked(process) for process in table] == ["a", "ab", "", "", "b", "", "a"]


def test_a_container_s_instance_of_the_same_name_is_another_one(tree: Tree) -> None:
    process = tree.add(10, environ=MARKED, nspid="10\t7", cgroup="0::/lxc/129/ns/system.slice/x.service\n")
    assert marked(process) == ""
    assert not belongs(process, record(), BOOT)
    # What is in the recorded cgroup belongs all the same, namespace or not.
    inner = tree.add(11, environ=MARKED, nspid="11\t1", cgroup=f"0::{UNIT}\n")
    assert belongs(inner, record(), BOOT)


def test_an_empty_name_marks_nobody(tree: Tree) -> None:
    nameless = InstanceRecord("", "process")
    assert members([tree.add(10), tree.add(11, environ=b"CLEANSLATE_INSTANCE=\0")], nameless, BOOT) == []


# -- the process group --------------------------------------------------------------------------------------------


def test_who_is_in_the_recorded_group_and_no_older_belongs(tree: Tree) -> None:
    tree.add(500, start_time=1000)
    tree.add(501, pgrp=500, start_time=1000)
    tree.add(502, pgrp=500, start_time=9000)
    tree.add(503, pgrp=500, start_time=999)
    tree.add(504, pgrp=504, start_time=2000, ppid=500)
    assert pids(members(tree.fs.processes().values(), record(), BOOT)) == [500, 501, 502]
    assert pids(members(tree.fs.processes().values(), record())) == [500, 501, 502]


def test_orphans_of_the_group_belong_after_their_leader_is_gone(tree: Tree) -> None:
    tree.add(502, pgrp=500, start_time=1200)
    assert pids(members(tree.fs.processes().values(), record(), BOOT)) == [502]
    tree.add(500, start_time=1000, state="Z")
    assert pids(members(tree.fs.processes().values(), record(), BOOT)) == [502]


def test_a_group_of_another_boot_is_another_group(tree: Tree) -> None:
    process = tree.add(500, start_time=1000)
    assert belongs(process, record(), BOOT)
    assert not belongs(process, record(), OTHER_BOOT)
    assert not belongs(process, record(boot_id=OTHER_BOOT), BOOT)
    assert not belongs(process, record(boot_id=OTHER_BOOT))
    # Unknown is not the same.
    assert not belongs(process, record(boot_id=""), BOOT)
    tree.boot("")
    assert not belongs(tree.fs.process(500), record(boot_id=""))


def test_a_group_of_a_container_that_started_anew_is_another_group(tree: Tree) -> None:
    # A container counts its pids from 1 again, in the same boot of the kernel.
    tree.add(1, start_time=5000)
    tree.add(502, pgrp=500, start_time=5100)
    assert members(tree.fs.processes().values(), record(), BOOT) == []
    assert pids(members(tree.fs.processes().values(), record(start_time=5050), BOOT)) == [502]


def test_the_next_owner_of_the_group_s_number_is_another_group(tree: Tree) -> None:
    # All of the instance had ended; much later its number is a login shell's, with children.
    tree.add(500, b"bash", start_time=77_000)
    tree.add(501, pgrp=500, start_time=78_000)
    assert members(tree.fs.processes().values(), record(), BOOT) == []


def test_a_main_process_in_a_group_that_another_leads(tree: Tree) -> None:
    tree.add(400, b"wrapper", start_time=900)
    tree.add(500, pgrp=400, start_time=1000)
    assert pids(members(tree.fs.processes().values(), record(pgrp=400), BOOT)) == [500]


@pytest.mark.parametrize("pgrp", [0, 1])
def test_a_number_that_is_no_group_makes_nobody_a_member(tree: Tree, pgrp: int) -> None:
    # From inside a container, the group of what was entered from outside shows as 0.
    tree.add(10, pgrp=pgrp)
    assert members(tree.fs.processes().values(), record(pgrp=pgrp), BOOT) == []


def test_a_record_without_a_start_time_says_nothing_of_groups(tree: Tree) -> None:
    tree.add(501, pgrp=500, start_time=1000)
    assert members(tree.fs.processes().values(), record(start_time=0), BOOT) == []
    assert pids(members(tree.fs.processes().values(), record(start_time=1), BOOT)) == [501]


# -- who never does -----------------------------------------------------------------------------------------------


def test_the_dead_and_the_kernel_s_own_are_no_members(tree: Tree) -> None:
    for pid, fields in ((500, {"state": "Z"}), (501, {"flags": 0x00200000}), (502, {"state": "X", "threads": 0})):
        tree.add(pid, pgrp=500, environ=MARKED, cgroup=f"0::{UNIT}\n", **fields)
    assert members(tree.fs.processes().values(), record(), BOOT) == []


def test_an_empty_record_has_no_members(tree: Tree) -> None:
    tree.add(1, pgrp=1)
    tree.add(2, pgrp=0, flags=0x00200000)
    tree.add(3, pgrp=3, environ=b"A=1\0")
    assert members(tree.fs.processes().values(), InstanceRecord("a", "process"), BOOT) == []


# -- servers that nobody recorded ---------------------------------------------------------------------------------


def test_the_group_of_a_target_whose_leader_is_dead(tree: Tree) -> None:
    tree.add(601, pgrp=600)
    tree.add(602, pgrp=600)
    tree.add(603, pgrp=600, state="Z")
    tree.add(700, pgrp=700)
    assert pids(unrecorded_members(tree.fs.processes().values(), [601])) == [601, 602]
    tree.add(600, state="Z")
    assert pids(unrecorded_members(tree.fs.processes().values(), [601])) == [601, 602]


def test_the_group_of_a_target_that_leads_it(tree: Tree) -> None:
    for pid in (600, 601):
        tree.add(pid, pgrp=600)
    assert pids(unrecorded_members(tree.fs.processes().values(), [600])) == [600, 601]
    assert pids(unrecorded_members(tree.fs.processes().values(), {600, 601})) == [600, 601]


def test_a_group_that_a_living_stranger_leads_is_the_stranger_s(tree: Tree) -> None:
    for pid in (600, 601, 602):
        tree.add(pid, b"bash", pgrp=600)
    assert unrecorded_members(tree.fs.processes().values(), [601]) == []
    tree.add(600, thread=699, pgrp=600)  # its main thread is gone, it lives
    assert unrecorded_members(tree.fs.processes().values(), [601]) == []


def test_a_leader_that_is_not_in_the_table_is_looked_up(tree: Tree) -> None:
    # The table may be confined to one user's processes, and the leader be root's sudo.
    for pid in (600, 601, 602):
        tree.add(pid, pgrp=600)
    table = [process for process in tree.fs.processes().values() if process.pid != 600]
    assert unrecorded_members(table, [601]) == []


def test_groups_that_cannot_be_one_s_own(tree: Tree) -> None:
    tree.add(1, pgrp=1)
    tree.add(601, pgrp=0)
    tree.add(602, pgrp=0)
    tree.add(603, pgrp=1)
    assert unrecorded_members(tree.fs.processes().values(), [601, 603, 999]) == []


# -- real processes -----------------------------------------------------------------------------------------------

FAMILY = """
import os, subprocess, sys
code = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={"PATH": "/bin"})
print(child.stdout.readline().strip(), flush=True)
sys.stdin.read()
"""


def test_real_orphans_of_a_real_group(children: Children) -> None:
    main = children.ready(FAMILY, start_new_session=True, env={MARK: "a"})
    orphan, fs = int(children.said), ProcFS()

    def look() -> list[int]:
        return pids(members([fs.process(pid) for pid in (main.pid, orphan)], record))

    started = fs.process(main.pid).start_time
    record = InstanceRecord("a", "process", pid=main.pid, start_time=started, pgrp=main.pid, boot_id=fs.boot_id())
    assert look() == sorted([main.pid, orphan])
    assert [marked(fs.process(pid)) for pid in (main.pid, orphan)] == ["a", ""]
    main.send_signal(signal.SIGKILL)
    while not fs.process(main.pid).zombie:
        pass
    assert look() == [orphan]
    assert pids(unrecorded_members([fs.process(orphan)], [orphan])) == [orphan]
    record.boot_id = OTHER_BOOT
    assert look() == []


def test_a_real_stranger_leads_the_group(children: Children) -> None:
    main = children.ready(FAMILY, start_new_session=True)
    worker = ProcFS().process(int(children.said))
    assert worker.pgrp == main.pid
    assert unrecorded_members([worker], [worker.pid]) == []
