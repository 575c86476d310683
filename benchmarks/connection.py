#!/usr/bin/env python3
# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The connection pct beside community.proxmox.proxmox_pct_remote, on the lab, with pct starting up in 0, 0.3 and 0.6 s.

Both under the same ansible-core: that of PyPI's `ansible`, in a virtual environment of its own under build/. Tasks are
timed by a callback plugin, without the first of each play, which connects; the connections take turns, round by round.
Prints the least of all samples, since other work on the machine only ever adds, and how many times faster ours is; ends
with 1 when a goal is missed. With --guests instead: so many guests get a task at once, under sshd's own MaxSessions and
MaxStartups, and none may be lost.

    tests/lab/lab up 1 2 0 && benchmarks/connection.py [--rounds 3] [--tasks 4] [--startups 0,0.3,0.6] [--json FILE]
    tests/lab/lab up 1 54 0 && benchmarks/connection.py --guests 50
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/lab"))

from labkit import machine  # noqa: E402
from labkit.fleet import Guest, Hypervisor  # noqa: E402
from labkit.place import Place  # noqa: E402

VENV = ROOT / "build/benchmark-connection"
THEIRS, OURS, FAST = "proxmox_pct_remote", "pct", "lxc-attach"
GOALS = {("ping", OURS): 4.0, ("ping", FAST): 8.0, ("copy 64 MiB", OURS): 1.0, ("fetch 64 MiB", OURS): 1.0}
FILE_BYTES = 64 << 20

TIMES = """
import os, time
from ansible.plugins.callback import CallbackBase

class CallbackModule(CallbackBase):
    CALLBACK_VERSION, CALLBACK_TYPE, CALLBACK_NAME = 2.0, "aggregate", "times"

    def v2_playbook_on_task_start(self, task, is_conditional):
        self.begun = time.monotonic()

    def v2_runner_on_ok(self, result):
        with open(os.environ["BENCHMARK_TIMES"], "a") as times:
            times.write(f"{time.monotonic() - self.begun}\\n")
"""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--tasks", type=int, default=4, help="timed tasks of a play")
    options.add_argument("--startups", default="0,0.3,0.6", help="seconds that pct takes to start")
    options.add_argument("--guests", type=int, default=0, help="how many guests get a task at once")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    place = Place()
    host = machine.the_fleet(place)[0]
    make_venv()
    with tempfile.TemporaryDirectory(prefix="csbench-") as folder:
        bench = Benchmark(place, host, Path(folder))
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors, {bench.versions()}")
        if given.guests:
            return bench.crowd(given.guests)
        startups = [float(text) for text in given.startups.split(",")]
        rows = bench.compare(startups, given.rounds, given.tasks)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(f"load {os.getloadavg()[0]:.1f} at the end")
    missed = [row for row in rows if row["goal"] and row["ratio"] < row["goal"]]
    return 1 if missed else 0


def goal(what: str, way: str, startup: float) -> float | None:
    """lxc-attach saves pct's start-up; where that is nothing, it is measured and owes nothing."""
    return None if way == FAST and startup == 0 else GOALS.get((what, way))


def make_venv() -> None:
    if not (VENV / ".done").exists():
        print(f"installing PyPI's ansible and paramiko into {VENV.relative_to(ROOT)}")
        venv.create(VENV, with_pip=True, clear=True)
        pip = [VENV / "bin/pip", "install", "--quiet", "--disable-pip-version-check", "ansible", "paramiko"]
        subprocess.run(pip, check=True)
        (VENV / ".done").touch()


class Benchmark:
    def __init__(self, place: Place, host: Hypervisor, folder: Path) -> None:
        self.place, self.host, self.folder = place, host, folder
        self.guest = next(guest for guest in host.guests if guest.kind == "privileged")
        (folder / "file").write_bytes(os.urandom(FILE_BYTES))
        (folder / "ansible.cfg").write_text("[defaults]\nhost_key_checking = false\n", encoding="utf-8")
        (folder / "times.py").write_text(TIMES, encoding="utf-8")
        self.times = folder / "times"

    def versions(self) -> str:
        told = subprocess.run([VENV / "bin/ansible", "--version"], capture_output=True, text=True, check=True).stdout
        galaxy = [VENV / "bin/ansible-galaxy", "collection", "list", "community.proxmox"]
        collection = subprocess.run(galaxy, capture_output=True, text=True, check=True).stdout
        core = re.search(r"core ([\d.]+)", told)
        theirs = re.search(r"community\.proxmox\s+([\d.]+)", collection)
        assert core and theirs
        return f"ansible-core {core[1]}, community.proxmox {theirs[1]}"

    # -- one play ------------------------------------------------------------------------------------------------------

    def inventory(self, guests: list[Guest], connection: str) -> Path:
        """One way into these guests; neither gets more than its documentation asks for."""
        if connection == THEIRS:
            shared = {
                "ansible_connection": "community.proxmox.proxmox_pct_remote",
                "ansible_host": self.host.address,
                "ansible_private_key_file": str(self.place.key),
            }
        else:
            shared = {
                "ansible_connection": "cleanslate.inference.pct",
                "ansible_pct_host": self.host.address,
                "ansible_pct_mode": connection,
                "ansible_ssh_private_key_file": str(self.place.key),
                "ansible_control_path_dir": str(self.folder / "cp"),
            }
        shared |= {"ansible_user": "root", "ansible_python_interpreter": "/usr/bin/python3"}
        hosts = {guest.name: {"proxmox_vmid": guest.vmid} for guest in guests}
        path = self.folder / f"{connection}-{len(guests)}.json"
        path.write_text(json.dumps({"all": {"vars": shared, "hosts": hosts}}), encoding="utf-8")
        return path

    def play(self, guests: list[Guest], connection: str, tasks: list[dict], forks: int = 5) -> tuple[float, str]:
        """Seconds of a play, run in the lab's network, and what it said. Raises when it fails."""
        playbook = self.folder / "play.json"
        playbook.write_text(json.dumps([{"hosts": "all", "gather_facts": False, "tasks": tasks}]), encoding="utf-8")
        argv = [VENV / "bin/ansible-playbook", "-i", self.inventory(guests, connection), "-f", str(forks), playbook]
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")},
            "ANSIBLE_CONFIG": str(self.folder / "ansible.cfg"),
            "ANSIBLE_COLLECTIONS_PATH": str(ROOT / ".collections"),
            "ANSIBLE_CALLBACK_PLUGINS": str(self.folder),
            "ANSIBLE_CALLBACKS_ENABLED": "times",
            "BENCHMARK_TIMES": str(self.times),
        }
        inside = ["ip", "netns", "exec", self.place.netns, *map(str, argv)]
        begun = time.monotonic()
        done = subprocess.run(inside, env=environment, capture_output=True, text=True, check=False)
        seconds = time.monotonic() - begun
        if done.returncode != 0:
            raise SystemExit(f"{connection}: the play failed\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        return seconds, done.stdout

    # -- one guest -----------------------------------------------------------------------------------------------------

    def samples(self, connection: str, tasks: list[dict], every: int = 1) -> list[float]:
        """Seconds of the tasks of a play on one guest: of each `every`th one after the first."""
        self.times.unlink(missing_ok=True)
        self.play([self.guest], connection, [PING, *tasks])
        taken = [float(line) for line in self.times.read_text(encoding="ascii").split()]
        return taken[every::every]

    def compare(self, startups: list[float], rounds: int, count: int) -> list[dict]:
        file, there, back = self.folder / "file", "/var/tmp/benchmark", self.folder / "back"
        away = {"ansible.builtin.file": {"path": there, "state": "absent"}}
        send = {"ansible.builtin.copy": {"src": str(file), "dest": there, "mode": "0600"}}
        gone = {"ansible.builtin.file": {"path": str(back), "state": "absent"}, "delegate_to": "localhost"}
        gone["vars"] = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
        fetch = {"ansible.builtin.fetch": {"src": there, "dest": str(back), "flat": True}}
        rows = []
        print(f"{'':14}{'pct starts in':>14}" + "".join(f"{name:>20}" for name in (THEIRS, OURS, FAST)) + "   faster")
        for startup in startups:
            self.set_startup(startup)
            rows += self.row("ping", startup, rounds, lambda way: self.samples(way, [PING] * count))
        self.set_startup(0)
        # Each transfer after its target has been removed, which is not timed.
        rows += self.row("copy 64 MiB", 0, rounds, lambda way: self.samples(way, [away, send], 2), (THEIRS, OURS))
        rows += self.row("fetch 64 MiB", 0, rounds, lambda way: self.samples(way, [gone, fetch], 2), (THEIRS, OURS))
        if back.read_bytes() != file.read_bytes():
            raise SystemExit("the file came back changed")
        self.play([self.guest], OURS, [away])
        return rows

    def row(self, what: str, startup: float, rounds: int, measure, ways=(THEIRS, OURS, FAST)) -> list[dict]:
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way in ways:
                taken[way] += measure(way)
        least = {way: min(taken[way]) for way in ways}
        rows = [
            {
                "what": what,
                "startup": startup,
                "way": way,
                "seconds": round(least[way], 4),
                "median": round(statistics.median(taken[way]), 4),
                "theirs": round(least[THEIRS], 4),
                "median_theirs": round(statistics.median(taken[THEIRS]), 4),
                "ratio": round(least[THEIRS] / least[way], 2),
                "goal": goal(what, way, startup),
            }
            for way in ways[1:]
        ]
        shown = "".join(f"{least[way] * 1000:>17.0f} ms" for way in ways) + " " * 20 * (3 - len(ways))
        ratios = ", ".join(
            f"{row['way']} {row['ratio']:.1f}x{' (goal missed)' if row['goal'] and row['ratio'] < row['goal'] else ''}"
            for row in rows
        )
        print(f"{what:14}{startup:>12g} s{shown}   {ratios}", flush=True)
        return rows

    def set_startup(self, seconds: float) -> None:
        words = ["sh", "-c", f"'echo startup = {seconds:g} > /etc/pct-standin.conf'"]
        if machine.ssh(self.place, self.host, words, stdin=subprocess.DEVNULL).returncode != 0:
            raise SystemExit("the hypervisor does not answer")

    # -- many guests ---------------------------------------------------------------------------------------------------

    def crowd(self, count: int) -> int:
        guests = [guest for guest in self.host.guests if guest.starts][:count]
        if len(guests) < count:
            raise SystemExit(f"this lab has {len(guests)} guests that run")
        limits = machine.ssh(
            self.place, self.host, ["sshd -T | grep -i -e maxsessions -e maxstartups"], capture_output=True
        )
        print(" ".join(limits.stdout.split()))
        for mode in (OURS, FAST):
            seconds, said = self.play(guests, mode, [PING] * 2, forks=count)
            reached = len(re.findall(r"ok=2 +changed=0 +unreachable=0 +failed=0", said))
            connections = len([path for path in (self.folder / "cp").iterdir() if path.is_socket()])
            print(
                f"{mode:12} {reached} of {count} guests, 2 tasks each in {seconds:.1f} s over {connections} connections"
            )
            if reached != count:
                return 1
        return 0


PING = {"ansible.builtin.ping": {}}

if __name__ == "__main__":
    sys.exit(main())
