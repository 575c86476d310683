# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Who is a target, who is spared, and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.net.ports import Listener, PortState
from ansible_collections.cleanslate.inference.plugins.module_utils.state.record import InstanceRecord, RecordStore
from ansible_collections.cleanslate.inference.plugins.module_utils.teardown.plan import Memory, PlanOptions, gather
from ansible_collections.cleanslate.inference.plugins.module_utils.teardown.restarter import name_restarter
from ansible_collections.cleanslate.inference.plugins.module_utils.teardown.units import Systemd, UnitKey, UnitState

from ..proctree import ProcTree, uuid
from .fakes import Scene, spared, targets

LAUNCH = ["python3", "-m", "sglang.launch_server"]
SLURM = "/system.slice/slurmstepd.scope/job_77/step_0/user/task_0"
POD = "/kubepods.slice/kubepods-pod11111111_2222_3333_4444_555555555555.slice/cri-containerd-%s.scope" % ("a" * 64)
DOCKER = "/system.slice/docker-%s.scope" % ("b" * 64)


@pytest.fixture(params=[False, True], ids=["plain files", "device nodes"])
def tree(tmp_path: Path, request: pytest.FixtureRequest) -> ProcTree:
    return ProcTree(tmp_path, gpus=4, real=request.param)


def server(
    tree: ProcTree, gpus: Sequence[int] = (0, 1), first: int = 500, group: int | None = None, **extra: Any
) -> None:
    """SGLang as it runs: main and detokenizer hold nodes too, all keep the other nodes open without mapping them."""
    devices = ",".join(uuid(number) for number in gpus)
    others = [tree.gpu(number) for number in range(4)]
    common: dict[str, Any] = {"environ": {"CUDA_VISIBLE_DEVICES": devices}, "pgrp": group or first, **extra}
    mapped = [tree.gpu(number) for number in gpus]
    tree.add(first, argv=LAUNCH, opens=others, maps=mapped, **common)
    tree.add(first + 1, argv=["python3", "-c", "resource_tracker"], ppid=first, **common)
    for number, gpu in enumerate(gpus):
        tree.add(
            first + 2 + number,
            comm="sglang::schedul",
            argv=["sglang::scheduler_TP%d" % number],
            ppid=first,
            opens=others,
            maps=[tree.gpu(gpu)],
            **common,
        )
    tree.add(
        first + 8, comm="sglang::detoken", argv=["sglang::detokenizer"], ppid=first, opens=others, maps=mapped, **common
    )


SERVER = {500, 501, 502, 503, 508}


def record(tree: ProcTree, name: str, **fields: Any) -> None:
    RecordStore(str(tree.state)).save(InstanceRecord(name=name, backend="process", **fields))


# -- scopes -----------------------------------------------------------------------------------------------------------


def test_match_takes_the_whole_server_and_no_stranger(tree: ProcTree) -> None:
    server(tree)
    tree.add(600, comm="trainer", opens=[tree.gpu(2)], maps=[tree.gpu(2)])
    plan = Scene(tree).plan("match")
    assert set(targets(plan)) == SERVER
    assert targets(plan)[501] == "descendant"
    assert spared(plan) == {600: "foreign_holder"}


def test_all_takes_every_holder(tree: ProcTree) -> None:
    server(tree)
    tree.add(600, comm="trainer", maps=[tree.gpu(2)])
    assert set(targets(Scene(tree).plan("all"))) == SERVER | {600}


def test_instances_takes_the_named_one_only(tree: ProcTree) -> None:
    server(tree, (0, 1), 500, environ={"CLEANSLATE_INSTANCE": "one"})
    server(tree, (2, 3), 700, environ={"CLEANSLATE_INSTANCE": "two"})
    record(tree, "one", gpus=[uuid(0), uuid(1)])
    record(tree, "two", gpus=[uuid(2), uuid(3)])
    plan = Scene(tree).plan("instances", instances=["one"])
    assert targets(plan) == dict.fromkeys(SERVER, "instance")
    assert set(spared(plan).values()) == {"other_instance"}


def test_another_instance_is_spared_whatever_it_matches(tree: ProcTree) -> None:
    server(tree, (0, 1), 500, environ={"CLEANSLATE_INSTANCE": "one"})
    record(tree, "one", gpus=[uuid(0), uuid(1)])
    plan = Scene(tree).plan("match")
    assert targets(plan) == {}
    assert {spared(plan)[pid] for pid in (500, 502, 503)} == {"other_instance"}
    assert set(targets(Scene(tree).plan("match", instances=["one"]))) == SERVER


def test_all_takes_instances_that_hold_the_gpus_and_no_others(tree: ProcTree) -> None:
    server(tree, (0, 1), 500, environ={"CLEANSLATE_INSTANCE": "one"})
    server(tree, (2, 3), 700, environ={"CLEANSLATE_INSTANCE": "two"})
    record(tree, "one", gpus=[uuid(0), uuid(1)])
    record(tree, "two", gpus=[uuid(2), uuid(3)])
    plan = Scene(tree, devices=["0", "1"]).plan("all")
    assert set(targets(plan)) == SERVER
    assert set(spared(plan).values()) <= {"other_instance", "neighbour", "other_gpus"}
    assert {700, 702, 703} <= set(spared(plan))


def test_an_instance_whose_record_is_lost_is_known_by_its_mark(tree: ProcTree) -> None:
    server(tree, environ={"CLEANSLATE_INSTANCE": "one"})
    assert set(targets(Scene(tree).plan("instances", instances=["one"]))) == SERVER


def test_an_unknown_instance_is_a_warning_that_names_the_known(tree: ProcTree) -> None:
    record(tree, "two")
    plan = Scene(tree).plan("instances", instances=["one"])
    assert plan.empty
    assert plan.warnings == ["Instance one is not known on this node (known: two)."]


def test_an_instance_by_its_process_group_of_this_boot(tree: ProcTree) -> None:
    boot = tree.proc / "sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("this-boot\n", encoding="ascii")
    server(tree)
    here = {"boot_id": "this-boot", "pid": 500, "pgrp": 500}
    record(tree, "one", start_time=1500, **here)
    assert set(targets(Scene(tree).plan("instances", instances=["one"]))) == SERVER
    # A group of the same number that began before the record's process is another one.
    record(tree, "one", start_time=99999, **here)
    assert targets(Scene(tree).plan("instances", instances=["one"])) == {}


# -- selectors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["match", "all"])
def test_a_server_on_other_gpus_lives_although_it_has_every_node_open(tree: ProcTree, scope: str) -> None:
    server(tree, (0, 1), 500)
    server(tree, (2, 3), 700)
    plan = Scene(tree, devices=["0", "1"]).plan(scope)
    assert set(targets(plan)) == SERVER
    assert {spared(plan)[pid] for pid in (700, 702, 703, 708)} == {"neighbour"}
    assert 701 not in targets(plan)


def test_a_match_that_holds_only_other_gpus_is_spared(tree: ProcTree) -> None:
    tree.add(500, argv=["sglang::scheduler"], maps=[tree.gpu(1)])
    plan = Scene(tree, devices=["0"]).plan("match")
    assert targets(plan) == {}
    assert spared(plan) == {500: "other_gpus"}


def test_devices_by_uuid_and_pci_id(tree: ProcTree) -> None:
    tree.add(500, argv=["sglang::scheduler"], maps=[tree.gpu(1)])
    assert set(targets(Scene(tree, devices=[uuid(1)]).plan("match"))) == {500}
    assert set(targets(Scene(tree, devices=["00000000:1A:00.0"]).plan("match"))) == {500}


def test_devices_confine_a_named_instance_as_a_whole(tree: ProcTree) -> None:
    server(tree, (0, 1), environ={"CLEANSLATE_INSTANCE": "one"})
    record(tree, "one", gpus=[uuid(0), uuid(1)])
    plan = Scene(tree, devices=["2"]).plan("instances", instances=["one"])
    assert targets(plan) == {}
    assert set(spared(plan)) >= {500, 502, 503, 508}
    # One GPU of it is enough: half a server is none.
    assert set(targets(Scene(tree, devices=["0"]).plan("instances", instances=["one"]))) == SERVER


def test_users_confine(tree: ProcTree) -> None:
    tree.add(500, argv=["sglang::scheduler"], maps=[tree.gpu(0)], uid=1000)
    tree.add(501, argv=["sglang::scheduler"], maps=[tree.gpu(0)], uid=1001)
    assert set(targets(Scene(tree, users=["1001"]).plan("all"))) == {501}


def test_containers_confine(tree: ProcTree) -> None:
    tree.add(500, argv=["sglang::scheduler"], maps=[tree.gpu(0)], cgroup="/lxc/129/ns/system.slice/a.service")
    tree.add(501, argv=["sglang::scheduler"], maps=[tree.gpu(0)], cgroup="/lxc/130/ns/system.slice/a.service")
    tree.add(502, argv=["sglang::scheduler"], maps=[tree.gpu(0)])
    plan = Scene(tree, containers=["129"]).plan("match")
    assert set(targets(plan)) == {500}
    assert spared(plan) == {501: "other_container", 502: "other_container"}


@pytest.mark.parametrize(
    ("option", "value"),
    [("devices", ["9"]), ("devices", ["GPU-nonsense"]), ("containers", ["404"]), ("users", ["nobody-here"])],
)
def test_a_selector_that_selects_nothing_is_an_error(tree: ProcTree, option: str, value: list[str]) -> None:
    with pytest.raises(CleanslateError) as caught:
        Scene(tree, **{option: value}).plan("all")
    assert option in caught.value.message


# -- who holds nothing --------------------------------------------------------------------------------------------


def test_a_match_that_holds_nothing_is_spared_unless_it_is_related(tree: ProcTree) -> None:
    tree.add(500, argv=LAUNCH)
    tree.add(502, argv=["sglang::scheduler"], ppid=500, maps=[tree.gpu(0)], pgrp=500)
    tree.add(600, argv=LAUNCH)
    tree.add(700, comm="bash", argv=["bash", "-c", "sglang.launch_server"])
    tree.add(702, argv=["sglang::scheduler"], ppid=700, maps=[tree.gpu(1)], pgrp=702)
    tree.add(703, comm="worker", ppid=702, pgrp=703)
    plan = Scene(tree).plan("match")
    assert targets(plan) == {500: "ancestor", 502: "match", 702: "match", 703: "descendant"}
    assert spared(plan) == {600: "not_holding"}


def test_a_group_whose_leader_is_dead_goes_with_its_server(tree: ProcTree) -> None:
    tree.add(502, argv=["sglang::scheduler"], maps=[tree.gpu(0)], pgrp=500)
    tree.add(504, argv=["python3", "-c", "spawn_main"], maps=[tree.gpu(0)], pgrp=500)
    tree.add(505, argv=["python3", "-c", "resource_tracker"], pgrp=500)
    assert targets(Scene(tree).plan("match")) == {502: "match", 504: "group", 505: "group"}


def test_a_group_led_by_a_living_stranger_is_not_the_servers(tree: ProcTree) -> None:
    tree.add(500, comm="bash", argv=["bash"])
    tree.add(502, argv=["sglang::scheduler"], ppid=500, maps=[tree.gpu(0)], pgrp=500)
    tree.add(503, comm="tee", argv=["tee", "log"], ppid=500, pgrp=500)
    assert targets(Scene(tree).plan("match")) == {502: "match"}


def test_two_servers_of_one_dead_script_are_told_apart(tree: ProcTree) -> None:
    server(tree, (0, 1), 500, group=400)
    server(tree, (2, 3), 700, group=400)
    plan = Scene(tree, devices=["0", "1"]).plan("match")
    assert set(targets(plan)) == SERVER
    assert 701 not in spared(plan)


def test_zombies_are_neither_targets_nor_spared(tree: ProcTree) -> None:
    tree.add(500, comm="sglang::schedul", state="Z")
    plan = Scene(tree).plan("all")
    assert (targets(plan), spared(plan)) == ({}, {})


def test_a_leader_that_has_exited_is_found_by_its_thread(tree: ProcTree) -> None:
    tree.add(500, comm="sglang::schedul", state="Z", threads=2, tasks={501: [tree.gpu(0)]})
    assert targets(Scene(tree).plan("match")) == {500: "match"}
    assert targets(Scene(tree).plan("all")) == {500: "match"}


# -- never --------------------------------------------------------------------------------------------------------


def test_the_module_and_what_started_it_are_never_targets(tree: ProcTree) -> None:
    tree.add(500, comm="sshd", argv=["sshd: root@notty"])
    tree.add(501, argv=LAUNCH, ppid=500, maps=[tree.gpu(0)])
    tree.add(502, argv=["python3", "AnsiballZ_gpu_teardown.py"], ppid=501, maps=[tree.gpu(0)])
    tree.add(503, argv=["sglang::scheduler"], ppid=1, maps=[tree.gpu(0)])
    plan = Scene(tree, self_pid=502).plan("all")
    assert targets(plan) == {503: "match"}
    assert spared(plan)[501] == "own"


def test_a_target_that_started_us_does_not_drag_us_along(tree: ProcTree) -> None:
    tree.add(500, comm="jupyter", argv=["jupyter"], maps=[tree.gpu(0)])
    tree.add(502, argv=["python3", "AnsiballZ_gpu_teardown.py"], ppid=500)
    tree.add(503, argv=["python3", "kernel"], ppid=500, maps=[tree.gpu(0)])
    plan = Scene(tree, self_pid=502).plan("all")
    assert targets(plan) == {503: "holder"}


def test_safe_programs_live_and_a_part_of_their_name_protects_nobody(tree: ProcTree) -> None:
    tree.add(500, comm="nvidia-persiste", argv=["/usr/bin/nvidia-persistenced"], opens=[tree.gpu(0)])
    tree.add(501, comm="nv-hostengine", argv=["/usr/bin/nv-hostengine"], opens=[tree.gpu(0)])
    tree.add(502, comm="dcgm-exporter", argv=["/usr/bin/dcgm-exporter"], opens=[tree.gpu(0)])
    tree.add(503, comm="Xorg", argv=["/usr/lib/xorg/Xorg"], maps=[tree.gpu(0)])
    tree.add(504, comm="sglang::schedul", argv=["sglang::scheduler_TP0"], maps=[tree.gpu(0)])
    tree.add(505, comm="python3", argv=["python3", "/opt/dcgm-exporter-report/train.py"], maps=[tree.gpu(0)])
    plan = Scene(tree).plan("all")
    assert targets(plan) == {504: "match", 505: "holder"}
    assert spared(plan) == dict.fromkeys((500, 501, 502, 503), "protected")


def test_protect_adds_whole_names(tree: ProcTree) -> None:
    tree.add(500, comm="trainer", argv=["/opt/trainer"], maps=[tree.gpu(0)])
    tree.add(501, comm="trainer2", argv=["/opt/trainer2"], maps=[tree.gpu(0)])
    plan = Scene(tree, protect=["trainer"]).plan("all")
    assert (targets(plan), spared(plan)) == ({501: "holder"}, {500: "protected"})


def test_process_one_is_never_a_target(tree: ProcTree) -> None:
    tree.end(1)
    tree.add(1, comm="tini", argv=["/tini"], ppid=0, maps=[tree.gpu(0)])
    plan = Scene(tree).plan("all")
    assert (targets(plan), spared(plan)) == ({}, {1: "init"})


def test_a_pattern_that_names_process_one_is_an_error(tree: ProcTree) -> None:
    tree.end(1)
    tree.add(1, argv=LAUNCH, ppid=0, maps=[tree.gpu(0)])
    with pytest.raises(CleanslateError, match=r"match: \{module: sglang.launch_server\} names process 1"):
        Scene(tree).plan("match")


def test_a_neighbour_is_never_a_target_whoever_started_it(tree: ProcTree) -> None:
    tree.add(500, comm="runner", argv=["runner"], maps=[tree.gpu(0)])
    tree.add(
        501,
        comm="worker",
        ppid=500,
        opens=[tree.gpu(0), tree.gpu(1)],
        maps=[tree.gpu(1)],
        environ={"CUDA_VISIBLE_DEVICES": uuid(1)},
    )
    plan = Scene(tree, devices=["0"]).plan("all")
    assert (targets(plan), spared(plan)) == ({500: "holder"}, {501: "neighbour"})


# -- managed by others --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cgroup", "scope", "reason"),
    [
        (SLURM, "match", "slurm"),
        (SLURM, "all", "slurm"),
        (POD, "match", "kubernetes"),
        (POD, "all", "kubernetes"),
        (DOCKER, "match", "docker"),
    ],
)
def test_jobs_and_pods_are_spared_and_named(tree: ProcTree, cgroup: str, scope: str, reason: str) -> None:
    tree.add(500, argv=["sglang::scheduler"], maps=[tree.gpu(0)], cgroup=cgroup)
    plan = Scene(tree).plan(scope)
    assert (targets(plan), spared(plan)) == ({}, {500: reason})
    assert plan.spared[0].detail


def test_a_live_docker_container_stops_the_plan_under_all(tree: ProcTree) -> None:
    tree.add(400, comm="containerd-shim", argv=["containerd-shim-runc-v2"])
    tree.add(500, argv=["sglang::scheduler"], ppid=400, maps=[tree.gpu(0)], cgroup=DOCKER)
    plan = Scene(tree).plan("all")
    assert targets(plan) == {}
    assert len(plan.blocked) == 1
    assert "docker stop " + "b" * 64 in plan.blocked[0]


def test_what_a_dead_docker_container_left_is_a_target_under_all(tree: ProcTree) -> None:
    tree.add(500, argv=["sglang::scheduler"], ppid=1, maps=[tree.gpu(0)], cgroup=DOCKER)
    plan = Scene(tree).plan("all")
    assert (targets(plan), plan.blocked) == ({500: "match"}, [])


def test_inside_a_container_its_own_processes_are_not_foreign(tree: ProcTree) -> None:
    tree.add(400, comm="sh", argv=["sh"], cgroup=DOCKER)
    tree.add(500, argv=["sglang::scheduler"], maps=[tree.gpu(0)], cgroup=DOCKER)
    assert targets(Scene(tree, self_pid=400).plan("match")) == {500: "match"}


# -- units and cgroups --------------------------------------------------------------------------------------------


def test_a_service_goes_with_its_main_process(tree: ProcTree) -> None:
    group = "/system.slice/llm.service"
    tree.add(500, argv=LAUNCH, maps=[tree.gpu(0)], cgroup=group)
    tree.add(501, comm="helper", argv=["helper"], cgroup=group + "/sub")
    scene = Scene(tree)
    key = scene.systemd.unit("llm.service", main_pid=500, restart="always")
    plan = scene.plan("match")
    assert targets(plan) == {500: "match", 501: "cgroup"}
    assert [(stop.key, set(stop.pids), stop.restart) for stop in plan.units] == [(key, {500, 501}, "always")]


def test_a_service_is_not_taken_for_a_process_that_is_not_its_main_one(tree: ProcTree) -> None:
    group = "/system.slice/cron.service"
    tree.add(500, comm="cron", argv=["/usr/sbin/cron"], cgroup=group)
    tree.add(501, argv=LAUNCH, maps=[tree.gpu(0)], ppid=1, cgroup=group)
    tree.add(502, comm="backup", argv=["backup"], ppid=1, cgroup=group)
    scene = Scene(tree)
    scene.systemd.unit("cron.service", main_pid=500)
    plan = scene.plan("match")
    assert (targets(plan), plan.units) == ({501: "match"}, [])


@pytest.mark.parametrize(
    "cgroup",
    [
        "/user.slice/user-1000.slice/session-3.scope",
        "/user.slice/user-1000.slice/user@1000.service/tmux-spawn-1.scope",
        "/user.slice/user-1000.slice/user@1000.service/init.scope",
        "/init.scope",
        "/system.slice",
        "/",
        "",
    ],
)
def test_sessions_managers_slices_and_the_root_are_never_taken(tree: ProcTree, cgroup: str) -> None:
    tree.add(500, argv=LAUNCH, maps=[tree.gpu(0)], cgroup=cgroup)
    tree.add(501, comm="shell", argv=["bash"], cgroup=cgroup)
    scene = Scene(tree)
    for name in ("session-3.scope", "user@1000.service", "init.scope", "system.slice"):
        scene.systemd.unit(name, main_pid=500, cgroup=cgroup)
    plan = scene.plan("match")
    assert (targets(plan), plan.units) == ({500: "match"}, [])


def test_a_users_own_service(tree: ProcTree) -> None:
    group = "/user.slice/user-1000.slice/user@1000.service/app.slice/llm.service"
    tree.add(500, argv=LAUNCH, maps=[tree.gpu(0)], cgroup=group)
    scene = Scene(tree)
    key = scene.systemd.unit("llm.service", manager=1000, main_pid=500, cgroup=group)
    plan = scene.plan("match")
    assert [stop.key for stop in plan.units] == [key]
    assert key.stop_command[1:] == ["--no-ask-password", "--user", "--machine=1000@.host", "stop", "--", "llm.service"]


def test_named_units_with_all_their_processes(tree: ProcTree) -> None:
    tree.add(500, comm="anything", argv=["anything"], cgroup="/system.slice/llm.service")
    scene = Scene(tree)
    scene.systemd.unit("llm.service", main_pid=500)
    plan = scene.plan("instances", units=["llm"])
    assert targets(plan) == {500: "unit"}
    assert [str(stop.key) for stop in plan.units] == ["llm.service"]


def test_a_unit_that_waits_for_its_restart_is_stopped(tree: ProcTree) -> None:
    scene = Scene(tree)
    scene.systemd.unit("llm.service", active="activating", sub="auto-restart", cgroup="", restart="always")
    plan = scene.plan("instances", units=["llm.service"])
    assert (targets(plan), [str(stop.key) for stop in plan.units]) == ({}, ["llm.service"])
    assert not plan.empty


def test_an_instances_unit_is_stopped_and_its_cgroup_taken(tree: ProcTree) -> None:
    group = "/system.slice/cleanslate-one.service"
    tree.add(500, comm="python3", cgroup=group, maps=[tree.gpu(0)])
    tree.add(501, comm="python3", ppid=1, cgroup=group)
    record(tree, "one", unit="cleanslate-one.service", cgroup=group)
    scene = Scene(tree)
    scene.systemd.unit("cleanslate-one.service", main_pid=500)
    plan = scene.plan("instances", instances=["one"])
    assert targets(plan) == {500: "instance", 501: "instance"}
    assert [str(stop.key) for stop in plan.units] == ["cleanslate-one.service"]


def test_an_unknown_unit_is_a_warning(tree: ProcTree) -> None:
    plan = Scene(tree).plan("instances", units=["llm.service"])
    assert plan.empty
    assert plan.warnings == ["Unit llm.service is not known on this node."]


def test_a_unit_that_we_run_in_is_not_stopped(tree: ProcTree) -> None:
    group = "/system.slice/agent.service"
    tree.add(500, argv=LAUNCH, maps=[tree.gpu(0)], cgroup=group)
    tree.add(501, comm="ansible", argv=["ansible"], cgroup=group)
    scene = Scene(tree, self_pid=501)
    scene.systemd.unit("agent.service", main_pid=500)
    plan = scene.plan("match")
    assert (targets(plan), plan.units) == ({500: "match"}, [])
    assert "this module runs in it" in plan.warnings[0]


# -- ports --------------------------------------------------------------------------------------------------------


def listening(pid: int | None, port: int = 30000) -> list[PortState]:
    return [PortState(port, [Listener(port, "127.0.0.1", 4242, () if pid is None else (pid,))], 0, 0)]


def test_a_listener_is_a_target_under_all(tree: ProcTree) -> None:
    tree.add(500, comm="anything", argv=["anything"])
    assert targets(Scene(tree).plan("all", listening(500))) == {500: "listener"}


def test_a_foreign_listener_is_spared_under_match(tree: ProcTree) -> None:
    tree.add(500, comm="nginx", argv=["nginx"])
    plan = Scene(tree).plan("match", listening(500))
    assert (targets(plan), spared(plan)) == ({}, {500: "port_busy"})
    assert "127.0.0.1 port 30000" in plan.spared[0].detail


def test_a_matched_listener_that_holds_nothing_is_a_target(tree: ProcTree) -> None:
    tree.add(500, argv=LAUNCH)
    assert targets(Scene(tree).plan("match", listening(500))) == {500: "listener"}


def test_a_matched_listener_on_other_gpus_is_spared(tree: ProcTree) -> None:
    tree.add(500, argv=LAUNCH, maps=[tree.gpu(1)])
    plan = Scene(tree, devices=["0"]).plan("match", listening(500))
    assert (targets(plan), spared(plan)) == ({}, {500: "port_busy"})
    assert "GPU 1" in plan.spared[0].detail


def test_a_protected_listener_is_spared_under_all(tree: ProcTree) -> None:
    tree.add(500, comm="keeper", argv=["keeper"])
    plan = Scene(tree, protect=["keeper"]).plan("all", listening(500))
    assert (targets(plan), spared(plan)) == ({}, {500: "port_busy"})


def test_an_orphan_of_the_server_that_kept_the_port(tree: ProcTree) -> None:
    tree.add(502, argv=["sglang::scheduler"], maps=[tree.gpu(0)], pgrp=500)
    tree.add(509, argv=["python3", "-c", "worker"], pgrp=500)
    plan = Scene(tree).plan("match", listening(509))
    assert targets(plan) == {502: "match", 509: "group"}
    assert spared(plan) == {}


def test_a_listener_out_of_sight_is_a_warning(tree: ProcTree) -> None:
    plan = Scene(tree).plan("all", listening(None))
    assert plan.warnings == ["Port 30000 is listened on (127.0.0.1) by a process that is out of sight."]


# -- warnings, memory, options ------------------------------------------------------------------------------------


def test_the_last_client_without_persistence_mode_is_announced(tree: ProcTree) -> None:
    tree.add(500, argv=["sglang::scheduler"], maps=[tree.gpu(0)])
    tree.nvml.set(0, persistence=False)
    tree.nvml.set(1, persistence=False)
    warnings = Scene(tree).plan("match").warnings
    assert len(warnings) == 1
    assert warnings[0].startswith("GPU 0: its last client goes")
    # nvidia-persistenced stays a client.
    tree.add(501, comm="nvidia-persiste", argv=["/usr/bin/nvidia-persistenced"], opens=[tree.gpu(0)])
    assert Scene(tree).plan("match").warnings == []


def test_a_client_of_the_driver_without_a_gpu_counts_for_the_whole_machine(tree: ProcTree) -> None:
    tree.add(500, argv=["trainer"], comm="trainer", opens=[tree.dev / "nvidiactl"])
    assert targets(Scene(tree).plan("all")) == {500: "holder"}
    assert targets(Scene(tree, devices=["0"]).plan("all")) == {}


def test_memory_keeps_what_can_no_longer_be_seen(tree: ProcTree) -> None:
    server(tree)
    scene = Scene(tree)
    memory = Memory()
    memory.add(scene.plan("match"))
    tree.end(500, 502, 503)
    tree.add(520, argv=["python3", "-c", "late"], pgrp=500, maps=[tree.gpu(0)])
    plan = scene.plan("match", memory=memory)
    assert set(targets(plan)) == {501, 508, 520}
    # The number of a group that has died out means nothing when somebody else leads it.
    tree.end(501, 508, 520)
    tree.add(500, comm="other", argv=["other"], start_time=90000, maps=[tree.gpu(0)])
    assert targets(scene.plan("match", memory=memory)) == {}


def test_rows_have_the_shape_of_holders_and_are_printable(tree: ProcTree) -> None:
    tree.add(500, comm="a\x1b[2J\n", argv=["sglang::scheduler", "\x1b[31m", "--api-key", "hush"], maps=[tree.gpu(0)])
    rows, _spared = Scene(tree).plan("match").rows()
    row = rows[0]
    assert (row["pid"], row["start_time"], row["decision"], row["reason"]) == (500, 1500, "target", "match")
    assert all(value.isprintable() for value in row.values() if isinstance(value, str))
    assert "hush" not in str(row)


@pytest.mark.parametrize(
    ("params", "option"),
    [
        ({}, "scope"),
        ({"scope": "everything"}, "scope"),
        ({"scope": "instances"}, "scope"),
        ({"scope": "instances", "instances": ["../x"]}, "instances"),
        ({"scope": "instances", "units": ["session-3.scope"]}, "units"),
        ({"scope": "instances", "units": ["user@1000.service"]}, "units"),
        ({"scope": "instances", "units": ["init.scope"]}, "units"),
        ({"scope": "instances", "units": ["system.slice"]}, "units"),
        ({"scope": "instances", "units": ["-x"]}, "units"),
        ({"scope": "instances", "units": ["a b"]}, "units"),
        ({"scope": "match", "match": ["*"]}, "match"),
        ({"scope": "match", "ports": [0]}, "ports"),
        ({"scope": "match", "ports": [65536]}, "ports"),
        ({"scope": "match", "ports": ["http"]}, "ports"),
    ],
)
def test_bad_options_are_named(params: dict[str, Any], option: str) -> None:
    with pytest.raises(CleanslateError) as caught:
        PlanOptions.from_params(params)
    assert caught.value.message.startswith(option + ":")


def test_from_the_hypervisor_a_guests_service_goes_with_its_main_process(tree: ProcTree) -> None:
    group = "/lxc/129/ns/system.slice/llm.service"
    tree.add(50500, argv=LAUNCH, maps=[tree.gpu(0)], cgroup=group, nspid=[50500, 77])
    tree.add(50501, comm="helper", argv=["helper"], ppid=1, cgroup=group, nspid=[50501, 78])
    tree.add(60500, argv=LAUNCH, maps=[tree.gpu(1)], cgroup=group.replace("129", "130"), nspid=[60500, 77])
    scene = Scene(tree, containers=["129"])
    inside = UnitKey("llm.service", None, "129")
    scene.systemd.states[inside] = UnitState(
        inside, load="loaded", active="active", main_pid=77, cgroup="/system.slice/llm.service", restart="always"
    )
    plan = scene.plan("match")
    assert targets(plan) == {50500: "match", 50501: "cgroup"}
    assert [(stop.key, set(stop.pids)) for stop in plan.units] == [(inside, {50500, 50501})]
    named = scene.plan("instances", units=["llm"])
    assert targets(named) == {50500: "unit", 50501: "unit"}


def test_from_the_hypervisor_an_instance_of_a_guest_is_known_by_its_mark(tree: ProcTree) -> None:
    # Its record is in the guest, where this call does not look; the guest next door has one of the same name.
    environ = {"CLEANSLATE_INSTANCE": "main"}
    for pid, guest, gpu in ((50500, 129, 0), (60500, 130, 1)):
        tree.add(
            pid,
            argv=LAUNCH,
            maps=[tree.gpu(gpu)],
            cgroup="/lxc/%d/ns/system.slice/x.service" % guest,
            nspid=[pid, 77],
            environ=environ,
        )
    chosen = Scene(tree, containers=["129"])
    assert targets(chosen.plan("instances", instances=["main"])) == {50500: "instance"}
    assert spared(chosen.plan("match")) == {50500: "other_instance", 60500: "other_container"}
    assert targets(chosen.plan("all")) == {50500: "match"}


def test_a_container_may_end_with_its_last_process(tree: ProcTree) -> None:
    tree.add(500, argv=LAUNCH, maps=[tree.gpu(0)], cgroup="/docker/%s" % ("ab" * 32), nspid=[500, 1])
    with tree.surveyor(containers=["ab" * 6]) as surveyor:
        assert surveyor.look().holder_pids == {500}
        tree.end(500)
        assert surveyor.look().holder_pids == set()


@pytest.mark.parametrize("scope", ["match", "all"])
def test_from_the_hypervisor_a_guests_first_process_is_spared_and_its_stop_command_told(
    tree: ProcTree, scope: str
) -> None:
    # A container whose first process is the server itself; in another one a server has a PID namespace of its own.
    tree.add(50001, argv=LAUNCH, maps=[tree.gpu(0)], cgroup="/lxc/129/ns", nspid=[50001, 1])
    tree.add(60500, argv=LAUNCH, maps=[tree.gpu(1)], cgroup="/lxc/130/ns/x.service", nspid=[60500, 77, 1])
    tree.add(70500, argv=LAUNCH, maps=[tree.gpu(2)], cgroup="/", nspid=[70500, 1])
    plan = Scene(tree).plan(scope)
    assert set(targets(plan)) == {60500, 70500}
    assert spared(plan) == {50001: "init"}
    assert "pct stop 129" in plan.spared[0].detail


def test_a_guests_restarter_is_stopped_in_the_guest(tree: ProcTree) -> None:
    tree.add(49000, comm="lxc-start", argv=["[lxc monitor] /var/lib/lxc 129"])
    tree.add(50001, comm="systemd", argv=["/sbin/init"], ppid=49000, cgroup="/lxc/129/ns/init.scope", nspid=[50001, 1])
    group = "/lxc/129/ns/system.slice/llm.service"
    tree.add(50500, ppid=50001, argv=LAUNCH, maps=[tree.gpu(0)], cgroup=group, nspid=[50500, 77])
    plan = Scene(tree, containers=["129"]).plan("match")
    named = name_restarter(plan.targets[0].process, plan)
    assert named is not None
    assert named.what == "unit llm.service in container 129"
    assert named.command.endswith(" 129 -- systemctl stop llm.service")


def test_from_the_hypervisor_guests_that_were_not_chosen_are_not_entered(tree: ProcTree) -> None:
    for pid, guest, gpu in ((50500, 129, 0), (60500, 130, 1)):
        group = "/lxc/%d/ns/system.slice/llm.service" % guest
        tree.add(pid, argv=LAUNCH, maps=[tree.gpu(gpu)], cgroup=group, nspid=[pid, 77])
    asked: list[UnitKey] = []

    class Asked(Systemd):
        def show(self, keys: Any) -> dict[UnitKey, UnitState]:
            asked.extend(keys)
            return {}

    for scope in ("match", "all"):
        options = PlanOptions.from_params({"scope": scope})
        with tree.surveyor(containers=["129"]) as surveyor:
            gather(surveyor.look(), options, Asked(), surveyor.fs)
        assert asked == [UnitKey("llm.service", None, "129")]
        asked.clear()


def test_who_could_not_be_looked_at_is_told(tree: ProcTree) -> None:
    folder = tree.add(500, comm="hidden", argv=["hidden"])
    (folder / "fd" / "3").symlink_to("nowhere")
    tree.denied.add(str(folder / "fd" / "3"))
    warnings = Scene(tree).plan("all").warnings
    assert warnings == [
        "1 processes could not be looked at, first 500 (hidden): who of them holds a GPU is not known here."
    ]
