# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How the tests look at a host of the lab: never through the collection's own code."""

from __future__ import annotations

import dataclasses
import json
import os
from functools import cache
from pathlib import Path

import testinfra
from labkit import machine
from labkit.fleet import Guest, Hypervisor
from labkit.place import Place

#: Runs on a hypervisor: every process of it and of its guests, as its kernel shows them.
SCAN = r"""
import glob, json, os, stat
found = []
for folder in glob.glob("/proc/[0-9]*"):
    def read(name):
        with open(folder + "/" + name, "rb") as file:
            return file.read().decode(errors="replace")
    try:
        head, tail = read("stat").rsplit(")", 1)
        fields = tail.split()
        pids = [line.split()[1:] for line in read("status").splitlines() if line.startswith("NSpid:")][0]
        nodes = []
        for descriptor in os.listdir(folder + "/fd"):
            try:
                what = os.stat(folder + "/fd/" + descriptor)
            except OSError:
                continue
            if stat.S_ISCHR(what.st_mode):
                nodes.append("%d:%d" % (os.major(what.st_rdev), os.minor(what.st_rdev)))
        found.append({
            "pid": int(os.path.basename(folder)), "inner_pid": int(pids[-1]), "state": fields[0],
            "start_time": int(fields[19]), "group": int(fields[2]), "cgroup": read("cgroup").strip().rsplit(":", 1)[1],
            "words": read("cmdline").rstrip("\0").split("\0"),
            "environment": dict(item.split("=", 1) for item in read("environ").split("\0") if "=" in item),
            "nodes": sorted(set(nodes)),
        })
    except OSError:
        continue
nodes = {}
for path in glob.glob("/dev/nvidia[0-9]*"):
    what = os.stat(path)
    nodes["%d:%d" % (os.major(what.st_rdev), os.minor(what.st_rdev))] = int(path[len("/dev/nvidia"):])
print(json.dumps({"processes": found, "gpus": nodes}))
"""


@dataclasses.dataclass(frozen=True)
class Process:
    """A process as the hypervisor's kernel shows it. `inner_pid` is its pid where it lives."""

    pid: int
    inner_pid: int
    state: str
    start_time: int
    group: int
    cgroup: str
    words: tuple[str, ...]
    environment: dict[str, str]
    gpus: frozenset[int]

    @property
    def title(self) -> str:
        return self.words[0]

    def uses(self, gpu: int, visible: tuple[int, ...]) -> bool:
        """Whether this GPU (by its minor) is among those that it was told to use, of those that its host has: SGLang's
        processes keep the nodes of others open, too."""
        told = self.environment.get("CUDA_VISIBLE_DEVICES")
        if told is None:
            return True
        names = told.split(",")
        return str(visible.index(gpu)) in names or f"GPU-fa4e0000-0000-4000-8000-{gpu:012x}" in names


@cache
def everybody(hypervisor: str) -> tuple[Process, ...]:
    """All that lives on a hypervisor and in its guests. One look for all tests of a run: they change nothing."""
    seen = json.loads(testinfra.get_host(f"lab://{hypervisor}").check_output("python3 -c %s", SCAN))
    return tuple(
        Process(
            words=tuple(row.pop("words")),
            gpus=frozenset(seen["gpus"][node] for node in row.pop("nodes") if node in seen["gpus"]),
            **row,
        )
        for row in seen["processes"]
        if row["state"] not in "ZX"
    )


class Machine:
    """A hypervisor or a guest of the lab."""

    def __init__(self, host: testinfra.host.Host) -> None:
        self.host = host
        self.name = host.backend.get_hostname()
        fleet = machine.the_fleet(Place())
        guests = {guest.name: (above, guest) for above in fleet for guest in above.guests}
        self.hypervisor: Hypervisor
        self.guest: Guest | None
        self.hypervisor, self.guest = guests.get(self.name) or (next(h for h in fleet if h.name == self.name), None)

    @property
    def gpus(self) -> tuple[int, ...]:
        """Its GPUs, by their minor."""
        return self.guest.gpus if self.guest else tuple(range(self.hypervisor.gpus))

    @property
    def _seen(self) -> tuple[Process, ...]:
        return everybody(self.hypervisor.name)

    @property
    def processes(self) -> list[Process]:
        """What runs on this host; on a hypervisor also what runs in its guests."""
        mark = f"/lxc/{self.guest.vmid}/" if self.guest else ""
        return [process for process in self._seen if mark in process.cgroup]

    def holders(self, gpu: int) -> list[Process]:
        """Who has this GPU's node open, anywhere on the hypervisor."""
        return [process for process in self._seen if gpu in process.gpus]

    def titled(self, beginning: str) -> list[Process]:
        return [process for process in self.processes if process.title.startswith(beginning)]

    def planted(self, name: str) -> Process | None:
        """The living process that plant.py started under this name, None when it is gone."""
        named = [process for process in self.processes if "PLANT" in process.environment]
        return next((process for process in named if json.loads(process.environment["PLANT"])["name"] == name), None)

    def instance(self, name: str) -> list[Process]:
        """The processes of a launched server, by the mark in their environment; not the supervisor of a bare one."""
        marked = [process for process in self.processes if process.environment.get("CLEANSLATE_INSTANCE") == name]
        return [process for process in marked if not any("cleanslate_supervise" in word for word in process.words)]

    def running(self, name: str, word: str) -> list[Process]:
        """Those whose command line has this word: -m is the main process."""
        return [process for process in self.instance(name) if word in process.words]


def report(host: str) -> dict:
    """What the last playbook of the scenario reported of a node."""
    nodes = json.loads(Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"], "report.json").read_text())["nodes"]
    return next(node for node in nodes if node["host"] == host)


def get(
    host: testinfra.host.Host, port: int, path: str, body: dict | None = None, key: str | None = None
) -> tuple[int, str]:
    """Ask a server over loopback of its host: status and body of the answer."""
    words = ["curl", "--silent", "--max-time", "30", "--write-out", "%{stderr}%{http_code}"]
    if body is not None:
        words += ["--json", json.dumps(body)]
    if key is not None:
        words += ["--header", f"Authorization: Bearer {key}"]
    words.append(f"http://127.0.0.1:{port}{path}")
    done = host.run(" ".join(["%s"] * len(words)), *words)
    return int(done.stderr or 0), done.stdout
