# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Containers of a hypervisor as hosts, their state and commands, and their devices, on a guest of each kind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from labkit import inventory
from labkit.client import Lab
from labkit.machine import poll

ANSIBLE = Path(sys.executable).parent
CONF = "/etc/pve/lxc/{%s}.conf"


def ansible(lab: Lab, tool: str, *words: str | Path, code: int = 0, **environment: str) -> str:
    """Run one of Ansible's programs; its stdout."""
    settings = {"ANSIBLE_CONFIG": str(lab.checkout / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1", **environment}
    argv = [str(ANSIBLE / tool), *map(str, words)]
    done = subprocess.run(
        argv, cwd=lab.checkout, env={**os.environ, **settings}, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def play(
    lab: Lab, folder: Path, role: str, *words: str, code: int = 0, tasks_from: str = "main", **variables: Any
) -> str:
    """A role of the collection on the hypervisor; its result is written to `result.json`."""
    name = "__gpu_node_passthrough" if role == "gpu_node" else f"__{role}_result"
    tasks = [
        {
            "ansible.builtin.include_role": {"name": f"cleanslate.inference.{role}", "tasks_from": tasks_from},
            "vars": variables,
        }
    ]
    save = {
        "ansible.builtin.copy": {
            "content": "{{ (%s_fixed if %s_fixed is defined and %s_fixed is not skipped else %s) | to_json }}"
            % ((name,) * 4),
            "dest": str(folder / "result.json"),
        },
        "delegate_to": "localhost",
        "vars": {"ansible_connection": "local", "ansible_python_interpreter": sys.executable},
        "check_mode": False,
        "diff": False,
    }
    content = [{"hosts": "hypervisors", "gather_facts": False, "tasks": [{"block": tasks, "always": [save]}]}]
    (folder / "play.yml").write_text(yaml.safe_dump(content), encoding="utf-8")
    where = inventory.folder(lab.place)
    return ansible(lab, "ansible-playbook", "-i", where, *words, folder / "play.yml", code=code)


def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


def rows(folder: Path) -> list[dict[str, Any]]:
    return result(folder)["containers"]


def ok(lab: Lab, line: str) -> str:
    done = lab.on_host(line)
    assert done.returncode == 0, done
    return done.stdout


@contextlib.contextmanager
def conf_kept(lab: Lab, kind: str) -> Iterator[str]:
    """Whatever is done to a guest's configuration is undone."""
    path = CONF % kind
    ok(lab, f"cp {path} /root/kept-{kind}")
    try:
        yield path
    finally:
        ok(lab, f"cp /root/kept-{kind} {path}")


@pytest.fixture(autouse=True, scope="module")
def _inventory(lab: Lab) -> None:
    assert lab.command("inventory").returncode == 0


# -- containers as hosts -----------------------------------------------------------------------------------------------


@pytest.fixture
def source(lab: Lab, tmp_path: Path) -> Path:
    """The inventory plugin's file, which says of the lab only how ssh gets there."""
    shared = inventory.inventory(lab.place, [lab.host])["all"]["vars"]
    given = {
        "plugin": "cleanslate.inference.pct_containers",
        "hosts": ["10.99.0.99", lab.host.address],
        "user": "root",
        "private_key_file": shared["ansible_ssh_private_key_file"],
        "ssh_executable": shared["ansible_ssh_executable"],
        "ssh_args": shared["ansible_ssh_common_args"] + " -o ConnectTimeout=2",
        "hypervisors": True,
        "groups": {"gpu_nodes": "gpu_minors | length > 0 and pct_status == 'running'"},
        "compose": {
            "ansible_ssh_executable": repr(shared["ansible_ssh_executable"]),
            "ansible_control_path_dir": repr(shared["ansible_control_path_dir"]),
            "ansible_python_interpreter": "'/usr/bin/python3'",
        },
    }
    path = tmp_path / "cluster.pct.yml"
    path.write_text(yaml.safe_dump(given), encoding="utf-8")
    return path


def listed(lab: Lab, source: Path) -> dict[str, Any]:
    strict = {"ANSIBLE_INVENTORY_UNPARSED_FAILED": "true", "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "true"}
    return json.loads(ansible(lab, "ansible-inventory", "-i", source, "--list", "--export", **strict))


def plain(value: Any) -> Any:
    """What --list marks as no template, without the mark."""
    if isinstance(value, dict):
        return (
            plain(value["__ansible_unsafe"]) if "__ansible_unsafe" in value else {k: plain(v) for k, v in value.items()}
        )
    return [plain(item) for item in value] if isinstance(value, list) else value


def test_every_guest_is_a_host(lab: Lab, source: Path) -> None:
    found = plain(listed(lab, source))
    names = {f"{'CT106' if guest.kind == 'noname' else guest.name}-{guest.vmid}": guest for guest in lab.host.guests}
    hostvars = found["_meta"]["hostvars"]
    assert set(found["pct_all"]["hosts"]) == set(names)
    assert found["hypervisors"]["hosts"] == [lab.host.name]
    for name, guest in names.items():
        known = hostvars[name]
        assert known["ansible_pct_vmid"] == guest.vmid
        assert known["ansible_pct_host"] == lab.host.address
        assert known["pct_status"] == ("running" if guest.starts else "stopped")
        assert known["pct_lock"] == ("backup" if guest.kind == "locked" else "")
        assert known["pct_unprivileged"] == guest.unprivileged
        assert known["gpu_minors"] == list(guest.gpus)
        assert known["gpu_shared_with"] == []
        assert known["pct_tags"] == ["gpu"]
    assert set(found["gpu_nodes"]["hosts"]) == {name for name, guest in names.items() if guest.starts}
    assert set(found["pct_status_stopped"]["hosts"]) == {n for n, guest in names.items() if not guest.starts}


def test_modules_run_in_all_that_run(lab: Lab, source: Path) -> None:
    done = ansible(lab, "ansible", "-i", source, "gpu_nodes", "-m", "ansible.builtin.command", "-a", "hostname")
    assert dict(re.findall(r"^(\S+) \| CHANGED \| rc=0 >>\n(\S+)$", done, re.MULTILINE)) == {
        f"{name}-{guest.vmid}": name
        for guest in lab.host.guests
        if guest.starts
        for name in ["CT106" if guest.kind == "noname" else guest.name]
    }


def test_pools_snapshots_and_shared_gpus(lab: Lab, source: Path) -> None:
    first = next(guest for guest in lab.host.guests if guest.kind == "privileged")
    with conf_kept(lab, "stopped") as conf:
        try:
            ok(lab, "echo 'pool:prod::{stopped},{privileged}::' > /etc/pve/user.cfg")
            ok(lab, f"echo 'lxc.mount.entry: /dev/nvidia{first.gpus[0]} dev/nvidia9 none bind,create=file' >> {conf}")
            ok(lab, f"printf '\\n[old]\\ntags: gone\\ndev0: /dev/nvidia7\\n' >> {conf}")
            found = plain(listed(lab, source))
        finally:
            ok(lab, "rm -f /etc/pve/user.cfg")
    stopped = next(guest for guest in lab.host.guests if guest.kind == "stopped")
    hostvars = found["_meta"]["hostvars"]
    known = hostvars[f"{stopped.name}-{stopped.vmid}"]
    assert known["gpu_minors"] == sorted([*stopped.gpus, first.gpus[0]])
    assert known["gpu_shared_with"] == [first.vmid]
    assert hostvars[f"{first.name}-{first.vmid}"]["gpu_shared_with"] == [stopped.vmid]
    assert known["pct_tags"] == ["gpu"]
    shared = {f"{guest.name}-{guest.vmid}" for guest in (first, stopped)}
    assert set(found["pct_pool_prod"]["hosts"]) == set(found["pct_gpu_shared"]["hosts"]) == shared
    assert set(found[f"pct_gpu_px1_{first.gpus[0]}"]["hosts"]) == shared


# -- their state and commands ------------------------------------------------------------------------------------------

HOSTILE = ["a b", "$HOME", "`id`", "it's", "", "*", "a\nb", "; touch /escaped"]


def test_a_list_of_containers(lab: Lab, tmp_path: Path) -> None:
    """States and commands, what is needless the second time, and one connection for all of it."""
    stopped = lab.vmid("stopped")
    made = {"argv": ["touch", "/root/made here"], "creates": "/root/made here"}
    containers: list[Any] = [
        {
            "vmid": lab.vmid("privileged"),
            "commands": [
                {"argv": ["printf", "%s|", *HOSTILE], "changed_when": False},
                {
                    "argv": ["sh", "-c", "echo changed; exit 255"],
                    "ok_codes": [255],
                    "changed_when": "'chang' not in stdout",
                },
                made,
            ],
        },
        {
            "vmid": lab.vmid("unprivileged"),
            "commands": [{"argv": ["cat"], "stdin": "in\n", "changed_when": False}, made],
        },
        {"vmid": lab.vmid("locked"), "commands": [{"argv": ["true"], "changed_when": "rc != 0"}]},
        {"vmid": stopped, "commands": [{"argv": ["systemctl", "is-active", "dbus.service"], "changed_when": False}]},
    ]
    try:
        play(lab, tmp_path, "proxmox_exec", "--check", proxmox_exec_containers=containers)
        assert [(row["changed"], row["status"]) for row in rows(tmp_path)] == [
            (True, "running"),
            (True, "running"),
            (True, "running"),  # what an expression will say of it is not known before
            (True, "running"),
        ]
        assert lab.on_host("pct status {stopped}").stdout == "status: stopped\n"
        shown = play(lab, tmp_path, "proxmox_exec", "-vvv", "--diff", proxmox_exec_containers=containers)
        assert shown.count("SSH: EXEC") == 1
        assert "+ran: touch /root/made here" in shown
        assert "+status: running" in shown
        first = rows(tmp_path)
        assert [row["failed"] for row in first] == [False] * 4
        assert first[0]["commands"][0]["stdout"] == "".join(f"{word}|" for word in HOSTILE)
        assert (first[0]["commands"][1]["rc"], first[0]["commands"][1]["changed"]) == (255, False)
        assert first[1]["commands"][0]["stdout"] == "in\n"
        assert (first[3]["status_before"], first[3]["status"]) == ("stopped", "running")
        # It is up when its commands run.
        assert first[3]["commands"][0]["stdout"] == "active\n"
        play(lab, tmp_path, "proxmox_exec", proxmox_exec_containers=containers)
        again = rows(tmp_path)
        assert [row["changed"] for row in again] == [False] * 4
        assert again[0]["commands"][2]["reason"] == "creates"
        assert not result(tmp_path)["changed"]
        play(lab, tmp_path, "proxmox_exec", proxmox_exec_containers=[stopped], proxmox_exec_state="stopped")
        assert [(row["changed"], row["status"]) for row in rows(tmp_path)] == [(True, "stopped")]
        play(lab, tmp_path, "proxmox_exec", proxmox_exec_containers=[stopped], proxmox_exec_state="stopped")
        assert [(row["changed"], row["status"]) for row in rows(tmp_path)] == [(False, "stopped")]
        assert lab.on_host("test -e /escaped").returncode == 1
    finally:
        lab.on_host(
            "pct stop {stopped}; for id in {privileged} {unprivileged}; do pct exec $id -- rm '/root/made here'; done"
        )


def test_what_cannot_be_done_is_told_apart(lab: Lab, tmp_path: Path) -> None:
    moved = "/etc/pve/nodes/px9/lxc"
    try:
        ok(lab, f"mkdir -p {moved}; printf 'hostname: far\\n' > {moved}/901.conf")
        with conf_kept(lab, "stopped") as conf:
            ok(lab, f"echo 'dev0: /dev/nosuch' >> {conf}")
            play(
                lab,
                tmp_path,
                "proxmox_exec",
                code=2,
                proxmox_exec_containers=[
                    999,
                    901,
                    {"vmid": lab.vmid("locked"), "state": "stopped"},
                    lab.vmid("stopped"),
                    {"vmid": lab.vmid("stopped"), "state": "unchanged"},
                    {"vmid": lab.vmid("privileged"), "commands": [["true"]]},
                ],
                proxmox_exec_commands=[["true"]],
            )
    finally:
        ok(lab, "rm -r /etc/pve/nodes/px9")
    found = rows(tmp_path)
    assert [row["code"] for row in found] == ["missing", "elsewhere", "locked", "missing_device", "not_running", ""]
    assert "it is on node px9" in found[1]["msg"]
    assert "locked (backup)" in found[2]["msg"]
    assert "/dev/nosuch" in found[3]["msg"]
    assert found[5]["commands"][0]["rc"] == 0
    assert "container 999: there is no container 999" in result(tmp_path)["msg"]


def test_a_command_that_takes_too_long_leaves_nothing(lab: Lab, tmp_path: Path) -> None:
    command = {"argv": ["sh", "-c", "sleep 8642 & sleep 8643"], "timeout": 1}
    containers = [{"vmid": lab.vmid("unprivileged"), "commands": [command]}]
    play(lab, tmp_path, "proxmox_exec", code=2, proxmox_exec_containers=containers)
    assert rows(tmp_path)[0]["code"] == "command_timeout"
    gone = "pct exec {unprivileged} -- pgrep -f 'sleep 864[23]'"
    poll(lambda: lab.on_host(gone).returncode == 1, 10, "the command's processes to end")


def test_a_guest_that_does_not_shut_down(lab: Lab, tmp_path: Path) -> None:
    """Its process 1 is stopped: it hears nothing."""
    kind = "noname"
    given = {
        "proxmox_exec_containers": [{"vmid": lab.vmid(kind), "state": "stopped"}],
        "proxmox_exec_stop_timeout": 1.0,
    }
    pid = ok(lab, "lxc-info -n {%s} -p -H" % kind).strip()
    try:
        ok(lab, f"kill -STOP {pid}")
        play(lab, tmp_path, "proxmox_exec", code=2, **given)
        (row,) = rows(tmp_path)
        assert (row["code"], row["status"]) == ("stop_failed", "running")
        play(lab, tmp_path, "proxmox_exec", proxmox_exec_force_stop=True, **given)
        (row,) = rows(tmp_path)
        assert (row["status"], row["changed"]) == ("stopped", True)
    finally:
        lab.on_host(f"kill -CONT {pid}")
        play(lab, tmp_path, "proxmox_exec", proxmox_exec_containers=[lab.vmid(kind)])


# -- their devices -----------------------------------------------------------------------------------------------------

#: The driver's numbers, as a hypervisor with real GPUs would list the nodes of the lab.
DEVICES = (
    "Character devices:\n  1 mem\n  7 nvidia\n 10 nvidiactl\n 10 nvidia-uvm\n203 nvidia-frontend\n\nBlock devices:\n"
)
VERSION = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"


@pytest.fixture
def driver(lab: Lab) -> Iterator[None]:
    """A hypervisor that says it has NVIDIA's driver."""
    ok(lab, f"printf %s {shlex.quote(DEVICES)} > /run/devices; mount --bind /run/devices /proc/devices")
    ok(lab, "mount -t tmpfs lab-driver /proc/driver; mkdir /proc/driver/nvidia")
    ok(lab, f"printf %s {shlex.quote(VERSION)} > /proc/driver/nvidia/version")
    try:
        yield
    finally:
        ok(lab, "umount /proc/devices; umount /proc/driver")


def opens(lab: Lab, kind: str) -> bool:
    gpu = next(guest.gpus[0] for guest in lab.host.guests if guest.kind == kind)
    return lab.on_host(f"pct exec {{{kind}}} -- sh -c ': <>/dev/nvidia{gpu}'").returncode == 0


def errors(folder: Path) -> list[tuple[int | None, str]]:
    return [(row["vmid"], row["code"]) for row in result(folder)["findings"] if row["severity"] == "error"]


def test_a_fresh_lab_has_nothing_to_mend(lab: Lab, tmp_path: Path, driver: None) -> None:
    play(lab, tmp_path, "gpu_node", tasks_from="passthrough")
    assert errors(tmp_path) == []
    assert len(rows(tmp_path)) == len(lab.host.guests)
    for row, guest in zip(rows(tmp_path), lab.host.guests, strict=True):
        assert row["gpu_minors"] == list(guest.gpus)
        if guest.starts:
            assert all(device["on_host"] == device["in_container"] != "" for device in row["devices"]), row
    play(lab, tmp_path, "gpu_node", tasks_from="passthrough", gpu_node_fix_passthrough=True)
    assert not result(tmp_path)["changed"]


def test_a_number_that_moved(lab: Lab, tmp_path: Path, driver: None) -> None:
    """The guest cannot open its GPU; the look says why, the mending changes the line, and then it can."""
    vmid = lab.vmid("privileged")
    restarted = {"proxmox_exec_containers": [vmid], "proxmox_exec_state": "restarted"}
    with conf_kept(lab, "privileged") as conf:
        try:
            ok(lab, f"sed -i 's/allow: c 7:/allow: c 509:/' {conf}; printf '\\n[old]\\nhostname: x\\n' >> {conf}")
            broken = ok(lab, f"cat {conf}")
            play(lab, tmp_path, "proxmox_exec", **restarted)
            assert not opens(lab, "privileged")

            shown = play(lab, tmp_path, "gpu_node", "--diff", tasks_from="passthrough")
            assert errors(tmp_path) == [(vmid, "major_moved")]
            assert "-lxc.cgroup2.devices.allow: c 509:* rwm" in shown
            assert "+lxc.cgroup2.devices.allow: c 7:* rwm" in shown
            assert not result(tmp_path)["changed"]
            fix = {"tasks_from": "passthrough", "gpu_node_fix_passthrough": True}
            play(lab, tmp_path, "gpu_node", "--check", **fix)
            assert result(tmp_path)["changed"]
            assert ok(lab, f"cat {conf}") == broken

            shown = play(lab, tmp_path, "gpu_node", "--diff", **fix)
            assert "+lxc.cgroup2.devices.allow: c 7:* rwm" in shown
            (fixed,) = result(tmp_path)["fixed"]
            assert (fixed["vmid"], fixed["codes"], fixed["restart"]) == (vmid, ["major_moved"], True)
            assert ok(lab, f"cat {fixed['backup_file']}") == broken
            assert ok(lab, f"cat {conf}") == broken.replace("c 509:", "c 7:")
            play(lab, tmp_path, "gpu_node", **fix)
            assert not result(tmp_path)["changed"]
            play(lab, tmp_path, "proxmox_exec", **restarted)
            assert opens(lab, "privileged")
        finally:
            ok(lab, "cp /root/kept-privileged " + conf)
            play(lab, tmp_path, "proxmox_exec", **restarted)


def test_what_else_is_wrong(lab: Lab, tmp_path: Path, driver: None) -> None:
    """Libraries of another version, a node that was lost, a plain file in its place, a GPU for two, a locked guest."""
    library = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.550.54.14"
    unprivileged, passthrough, locked = (lab.vmid(kind) for kind in ("unprivileged", "passthrough", "locked"))
    gpu = {guest.kind: guest.gpus[0] for guest in lab.host.guests}
    node = f"/dev/nvidia{gpu['passthrough']}"
    numbers = ok(lab, f"stat -c '%Hr %Lr' {node}").strip()
    with conf_kept(lab, "locked") as conf, conf_kept(lab, "stopped") as other:
        try:
            ok(lab, f"pct exec {{unprivileged}} -- touch {library}")
            ok(lab, f"rm {node}; sed -i '/nvidia-uvm/d' {conf}")
            ok(lab, f"sed -i 's,/dev/nvidia{gpu['stopped']} ,/dev/nvidia{gpu['privileged']} ,' {other}")
            play(lab, tmp_path, "gpu_node", tasks_from="passthrough", gpu_node_fix_passthrough=True)
            done = result(tmp_path)
        finally:
            ok(lab, f"mknod -m 666 {node} c {numbers}; pct exec {{unprivileged}} -- rm {library}")
    assert not done["changed"]
    assert sorted(errors(tmp_path)) == [
        (unprivileged, "library_mismatch"),
        (passthrough, "missing_node"),
        (locked, "missing_control_node"),
    ]
    assert [(row["vmid"], "locked (backup)" in row["reason"]) for row in done["kept"]] == [(locked, True)]
    shared = {row["vmid"] for row in done["findings"] if row["code"] == "shared_gpu"}
    assert shared == {lab.vmid("privileged"), lab.vmid("stopped")}
