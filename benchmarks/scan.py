#!/usr/bin/env python3
# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How long a scan for the holders of a node takes, beside fuser on the same node.

Starts processes in a PID namespace of its own, so that both look at the same ones and at nothing else, and lets the two
take turns. Prints medians, their ratio, and the memory that the scan needed.

    benchmarks/scan.py [--processes 2000] [--descriptors 10] [--rounds 7]
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / ".collections"))

from ansible_collections.cleanslate.inference.plugins.module_utils.proc.scan import (  # noqa: E402
    ScanResult,
    Watch,
    key_for_path,
    scan,
)
from ansible_collections.cleanslate.inference.plugins.module_utils.proc.table import ProcFS  # noqa: E402

INSIDE = "CLEANSLATE_BENCHMARK_INSIDE"


def crowd(processes: int, descriptors: int, node: str) -> None:
    """Processes with so many descriptors each; every hundredth one holds the node."""
    held = [os.open(os.devnull, os.O_RDWR) for _ in range(descriptors - 1)]
    for number in range(processes):
        if os.fork() == 0:
            held.append(os.open(node if number % 100 == 0 else os.devnull, os.O_RDWR))
            for fd in range(3):
                os.close(fd)
            while True:
                signal.pause()


def ours(node: str) -> ScanResult:
    key = key_for_path(node)
    assert key is not None
    return scan(ProcFS(), Watch(frozenset([key]), {os.path.basename(node): key}))


def fuser(node: str) -> set[int]:
    done = subprocess.run(["fuser", node], capture_output=True, text=True, check=False)
    return {int(word) for word in done.stdout.split()}


def worked() -> float:
    """Processor time of this process and of those that it started and that have ended, in seconds."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def measure(processes: int, descriptors: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        node = os.path.join(folder, "nvidia0")
        if os.geteuid() == 0:
            os.mknod(node, 0o600 | 0o020000, os.makedev(1, 7))  # a device that nobody else has open: /dev/full's number
        else:
            Path(node).touch()
        crowd(processes, descriptors, node)
        times: dict[str, list[float]] = {"scan": [], "fuser": []}
        work: dict[str, list[float]] = {"scan": [], "fuser": []}
        for _ in range(rounds):
            started, before = time.perf_counter(), worked()
            found = ours(node)
            times["scan"].append(time.perf_counter() - started)
            work["scan"].append(worked() - before)
            # The helpers of a scan share its memory; what they wrote themselves is at most what the largest has.
            helper = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
            started, before = time.perf_counter(), worked()
            theirs = fuser(node)
            times["fuser"].append(time.perf_counter() - started)
            work["fuser"].append(worked() - before)
            assert set(found.found) == theirs, "the two disagree"
    medians = {name: statistics.median(values) for name, values in times.items()}
    effort = {name: statistics.median(values) for name, values in work.items()}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        "%d processes with %d descriptors each, %d rounds in turn, %d processors"
        % (found.processes, descriptors, rounds, len(os.sched_getaffinity(0)))
    )
    print("        time      processor time")
    print("scan   %6.1f ms  %6.1f ms (%d holders)" % (medians["scan"] * 1e3, effort["scan"] * 1e3, len(found.found)))
    print("fuser  %6.1f ms  %6.1f ms" % (medians["fuser"] * 1e3, effort["fuser"] * 1e3))
    print("ratio  %6.2f     %6.2f" % (medians["scan"] / medians["fuser"], effort["scan"] / effort["fuser"]))
    print("memory %6.1f MiB, of one helper %.1f MiB" % (peak, helper))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--processes", type=int, default=2000)
    parser.add_argument("--descriptors", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    if shutil.which("fuser") is None:
        parser.error("there is no fuser here (package psmisc)")
    if os.environ.get(INSIDE):
        measure(options.processes, options.descriptors, options.rounds)
        return 0
    own = [] if os.geteuid() == 0 else ["--user", "--map-current-user"]
    words = ["unshare", *own, "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, *sys.argv]
    return subprocess.run(words, env={**os.environ, INSIDE: "1"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
