# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From the hypervisor: the modules run on it, by Ansible over ssh, and see, end and blame the holders of all guests.

One story in order, on guests of each kind: a unit that revives its server, a server that somebody started by hand, a
bystander in a guest that is not chosen, and holders on the hypervisor itself. GPUs are dealt out by the lab: GPU N is
/dev/nvidiaN of the hypervisor.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest
from labkit import inventory
from labkit.client import Lab
from labkit.machine import poll

ANSIBLE = Path(sys.executable).with_name("ansible")
PLANT = Path(__file__).resolve().parents[3] / "molecule/resources/plant.py"

#: A unit whose server comes back at once, whoever ends it.
UNIT = """[Service]
Environment=SPT_NOENV=1
Environment='PLANT=%s'
ExecStart=/opt/sglang/bin/python /run/plant.py revived
Restart=always
RestartSec=20ms
"""

#: What those who were started by hand call themselves: one of them would clear the reader's screen and forge a line.
TITLES = {
    "passthrough": "sglang::scheduler",
    "unprivileged": "\x1b[2J\x1b]0;x\x07 sglang\npx1 | SUCCESS => {}\u202e\x9b",
}

#: Runs on the hypervisor: pid, container and name of what was planted there and in its guests.
PLANTED = r"""
import json, os
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open("/proc/%s/environ" % pid, "rb") as file:
            found = dict(item.split(b"=", 1) for item in file.read().split(b"\0") if b"=" in item)
        with open("/proc/%s/stat" % pid, "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0]
        if b"PLANT" in found and state not in b"ZX":
            print(json.dumps([json.loads(found[b"PLANT"])["name"], int(pid)]))
    except OSError:
        continue
"""


class Hypervisor:
    """The hypervisor as the tests use it: modules of the collection through Ansible, and everything else by ssh."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.gpu = {guest.kind: guest.gpus[0] for guest in lab.host.guests}

    def ok(self, line: str, stdin: bytes = b"") -> str:
        done = self.lab.on_host(line, stdin)
        assert done.returncode == 0, done
        return done.stdout

    def place(self, kind: str, path: str, content: bytes) -> None:
        self.ok("pct exec {%s} -- sh -c %s" % (kind, shlex.quote("cat >" + path)), content)

    def plant(self, kind: str, *entries: dict[str, Any], terminal: bool = False) -> None:
        """Start holders in a guest (by pct exec: outside of every unit), or on the hypervisor (by ssh)."""
        command = "python3 /run/plant.py %s" % shlex.quote(json.dumps(entries))
        if kind:
            command = "pct exec {%s} -- /opt/sglang/bin/%s" % (kind, command)
        self.ok("script -qec %s /dev/null" % shlex.quote(command) if terminal else command)

    def planted(self) -> dict[str, int]:
        lines = self.ok("python3 -", PLANTED.encode()).splitlines()
        return dict(json.loads(line) for line in lines)

    def output(self, name: str, *more: str, form: str = "yaml", fails: bool = False, **options: Any) -> str:
        """What Ansible prints when one module runs on the hypervisor."""
        argv = [str(ANSIBLE), "-i", str(inventory.folder(self.lab.place)), self.lab.host.name]
        argv += ["-m", "cleanslate.inference." + name, *more]
        argv += ["-a", json.dumps(options)] if options else []
        environment = {**os.environ, "ANSIBLE_CONFIG": str(self.lab.checkout / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
        environment["ANSIBLE_CALLBACK_RESULT_FORMAT"] = form
        done = subprocess.run(
            argv, cwd=self.lab.checkout, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == (2 if fails else 0), done.stdout + done.stderr
        # Names that people may choose reach the terminal in print only.
        assert all(letter.isprintable() or letter == "\n" for letter in done.stdout + done.stderr)
        return done.stdout

    def module(self, name: str, check: bool = False, fails: bool = False, **options: Any) -> dict[str, Any]:
        """The result of one module on the hypervisor."""
        more = ["--check"] if check else []
        text = self.output(name, *more, form="json", fails=fails, **options)
        return json.loads(re.split(r"^px1 \| \w+!? => ", text, maxsplit=1, flags=re.MULTILINE)[1])


@pytest.fixture(scope="module")
def host(lab: Lab) -> Iterator[Hypervisor]:
    made = Hypervisor(lab)
    assert lab.command("inventory").returncode == 0
    node = "/dev/nvidia%d"
    made.ok(
        "mkdir -p /var/lib/cleanslate/lib; cat >/var/lib/cleanslate/lib/pynvml.py", Path(pynvml.__file__).read_bytes()
    )
    made.ok("cat >/run/plant.py", PLANT.read_bytes())
    for kind in ("privileged", "unprivileged", "passthrough", "locked"):
        made.place(kind, "/run/plant.py", PLANT.read_bytes())
    try:
        for kind in ("privileged", "locked"):
            held = [node % made.gpu[kind], "/dev/nvidiactl"]
            entry = json.dumps({"name": "unit-" + kind, "title": "sglang::scheduler_TP0", "hold": held})
            made.place(kind, "/etc/systemd/system/llm.service", (UNIT % entry).encode())
            made.ok("pct exec {%s} -- sh -c 'systemctl daemon-reload && systemctl start llm'" % kind)
        for kind in ("unprivileged", "passthrough"):
            held = [node % made.gpu[kind]]
            title, marked = TITLES[kind], {"CLEANSLATE_INSTANCE": "main", "CUDA_VISIBLE_DEVICES": uuid(made.gpu[kind])}
            made.plant(kind, {"name": "by-hand-" + kind, "title": title, "hold": held, "environment": marked})
        poll(lambda: {"unit-privileged", "unit-locked"} <= set(made.planted()), 20, "the units")
        yield made
    finally:
        lab.on_host("for guest in {privileged} {locked}; do pct exec $guest -- systemctl stop llm; done")
        lab.on_host("kill -KILL %s" % " ".join(str(pid) for pid in made.planted().values()))


def uuid(gpu: int) -> str:
    return "GPU-fa4e0000-0000-4000-8000-0000000000%02x" % gpu


def by_pid(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {row["pid"]: row for row in rows}


def test_one_look_sees_and_attributes_the_holders_of_all_guests(host: Hypervisor) -> None:
    found = host.module("gpu_info")
    rows, planted = by_pid(found["holders"]), host.planted()
    assert set(rows) == set(planted.values())
    for name, pid in planted.items():
        kind = name.rpartition("-")[2]
        row = rows[pid]
        assert row["container"] == "lxc/%d" % host.lab.vmid(kind)
        assert "/dev/nvidia%d" % host.gpu[kind] in row["devices"]
        assert row["unit"] == ("llm.service" if name.startswith("unit") else "")
        assert row["gpu_memory"] == 1 << 30
        inside = "pct exec {%s} -- cat /proc/%d/cmdline" % (kind, row["guest_pid"])
        assert TITLES.get(kind, "sglang::scheduler").split("\n")[0] in host.ok(inside)
    # A guest's own node for the same device: what fuser on the hypervisor looks for is another inode.
    passed = planted["by-hand-passthrough"]
    assert str(passed) not in host.lab.on_host("fuser /dev/nvidia%d" % host.gpu["passthrough"]).stdout.split()


def test_names_reach_the_terminal_in_print_only(host: Hypervisor) -> None:
    text = host.output("gpu_free", fails=True, timeout=0.5)
    assert "\\x1b[2J" in text
    assert "\npx1 | SUCCESS => {}" not in text


def test_the_plan_names_who_is_chosen_and_touches_nobody(host: Hypervisor) -> None:
    planted = host.planted()
    chosen = [str(host.lab.vmid(kind)) for kind in ("privileged", "passthrough")]
    plan = host.module("gpu_teardown", check=True, scope="all", containers=chosen)
    assert set(by_pid(plan["killed"])) == {planted["unit-privileged"], planted["by-hand-passthrough"]}
    spared = {pid: row["reason"] for pid, row in by_pid(plan["spared"]).items()}
    assert spared == dict.fromkeys((planted["unit-locked"], planted["by-hand-unprivileged"]), "other_container")
    assert plan["stopped_units"] == ["llm.service in container %s" % chosen[0]]
    assert host.planted() == planted


def test_a_container_that_is_not_there_ends_nobody(host: Hypervisor) -> None:
    planted = host.planted()
    stopped = str(host.lab.vmid("stopped"))
    refused = host.module("gpu_teardown", fails=True, scope="all", containers=[stopped, "999"])
    assert refused["msg"].startswith("containers: ")
    assert "lxc/%d" % host.lab.vmid("privileged") in refused["msg"]
    assert host.planted() == planted


def test_the_chosen_guests_holders_end_and_what_restarts_them_stays_stopped(host: Hypervisor) -> None:
    before = host.planted()
    host.plant("privileged", {"name": "shm", "hold": []})
    residue = "/dev/shm/sgl_shm_mq_999999_0a1b2c3d"
    host.ok("pct exec {privileged} -- touch %s" % residue)
    chosen = [str(host.lab.vmid(kind)) for kind in ("privileged", "passthrough")]
    done = host.module("gpu_teardown", scope="all", containers=chosen, term_timeout=5)
    killed = by_pid(done["killed"])
    assert set(killed) == {before["unit-privileged"], before["by-hand-passthrough"]}
    assert killed[before["unit-privileged"]]["signal"] == "unit"
    assert done["stopped_units"] == ["llm.service in container %s" % chosen[0]]
    assert done["survivors"] == []
    # Stopped by its own manager: nobody revives it.
    state = host.lab.on_host("pct exec {privileged} -- systemctl show -p ActiveState,SubState --value llm").stdout
    assert state.split() == ["inactive", "dead"]
    after = host.planted()
    assert {name: pid for name, pid in after.items() if name != "shm"} == {
        name: before[name] for name in ("unit-locked", "by-hand-unprivileged")
    }
    # A guest's files are the guest's: a sweep of the hypervisor does not reach them.
    host.module("runtime_residue", min_age=0)
    assert host.ok("pct exec {privileged} -- ls %s" % residue).strip() == residue
    again = host.module("gpu_teardown", scope="all", containers=chosen)
    assert (again["changed"], again["killed"], again["stopped_units"]) == (False, [], [])


def test_what_other_guests_hold_is_blamed_on_them(host: Hypervisor) -> None:
    chosen = [str(host.lab.vmid(kind)) for kind in ("privileged", "passthrough")]
    gpus = [str(host.gpu[kind]) for kind in ("privileged", "passthrough", "unprivileged")]
    busy = host.module("gpu_free", fails=True, containers=chosen, devices=gpus, timeout=1)
    assert busy["verdict"] == "busy"
    assert busy["reasons"] == ["foreign_holder"]
    assert "lxc/%d" % host.lab.vmid("unprivileged") in busy["msg"]
    assert [gpu["verdict"] for gpu in sorted(busy["gpus"], key=lambda gpu: gpus.index(str(gpu["index"])))] == [
        "free",
        "free",
        "busy",
    ]


def test_an_instance_and_a_unit_of_a_guest_by_name(host: Hypervisor) -> None:
    planted = host.planted()
    one, locked = (str(host.lab.vmid(kind)) for kind in ("unprivileged", "locked"))
    done = host.module("gpu_teardown", scope="instances", instances=["main"], units=["llm"], containers=[one, locked])
    reasons = {pid: row["reason"] for pid, row in by_pid(done["killed"]).items()}
    assert reasons == {planted["by-hand-unprivileged"]: "instance", planted["unit-locked"]: "unit"}
    # A guest under a lock can be entered all the same, as on Proxmox.
    assert done["stopped_units"] == ["llm.service in container %s" % locked]
    assert set(host.planted()) == {"shm"}


def test_on_the_hypervisor_itself_what_was_started_by_ssh_ends_and_its_neighbour_lives(host: Hypervisor) -> None:
    every = ["/dev/nvidia%d" % number for number in range(host.lab.host.gpus)]
    spare = sorted(set(range(host.lab.host.gpus)) - set(host.gpu.values()))
    ours, theirs = spare[0], spare[-1]
    sshd = host.ok("systemctl show -p MainPID --value ssh").strip()
    target = {"name": "by-ssh", "title": "sglang::scheduler_TP0", "hold": [every[ours]]}
    # Other nodes for the same device, one of them deleted, and a node of that name for another device: fuser finds
    # none of them by the path.
    number = host.ok("stat -c '%%Hr %%Lr' %s" % every[ours])
    nodes = {name: "/dev/%s/nvidia%d" % (name, ours) for name in ("second", "deleted", "unrelated")}
    for name, path in nodes.items():
        device = "1 3" if name == "unrelated" else number.strip()
        host.ok("mkdir -p /dev/%s; rm -f %s; mknod %s c %s" % (name, path, path, device))
    host.plant("", *({"name": name, "script": "/run/launch.py", "hold": [path]} for name, path in nodes.items()))
    host.ok("rm %s" % nodes["deleted"])
    found = host.lab.on_host("fuser %s" % every[ours]).stdout.split()
    assert found == []
    host.plant("", target, {"name": "in-terminal", "script": "/run/launch.py", "hold": [every[ours]]}, terminal=True)
    # As SGLang does: every node is open, one GPU is used.
    environ = {"CUDA_VISIBLE_DEVICES": uuid(theirs)}
    host.plant("", {"name": "neighbour", "title": "sglang::scheduler_TP0", "hold": every, "environment": environ})
    planted = host.planted()
    for scope, ended in (("match", {"by-ssh"}), ("all", {"in-terminal", "second", "deleted"})):
        done = host.module("gpu_teardown", scope=scope, devices=[str(ours)])
        assert {row["pid"] for row in done["killed"]} == {planted[name] for name in ended}
        assert done["stopped_units"] == []
        assert by_pid(done["spared"])[planted["neighbour"]]["reason"] == "neighbour"
    assert set(host.planted()) == {"shm", "neighbour", "unrelated"}
    # They ran in the cgroup of the ssh service, which carries everybody else's sessions, too.
    assert host.ok("systemctl show -p MainPID --value ssh").strip() == sshd
