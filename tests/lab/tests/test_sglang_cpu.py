# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The real SGLang 0.5.23 in a guest: it starts as anybody starts it, and its processes are what the collection meets.

The guest needs what tests/lab/sglang_cpu/build makes.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

import pytest
from labkit.client import Done, Lab
from labkit.fleet import Guest
from labkit.machine import poll

PYTHON = "/opt/sglang/bin/python"
SERVE = (
    f"{PYTHON} -m sglang.launch_server --model-path /opt/sglang/models/tiny --host 127.0.0.1 --port 30900 --device cpu"
    " --load-format dummy --sampling-backend pytorch --grammar-backend none --mem-fraction-static 0.3"
    " --max-total-tokens 4096 --max-running-requests 8"
)
UNIT = "sglang-under-test"
CGROUP = f"/sys/fs/cgroup/system.slice/{UNIT}.service"


class Server:
    def __init__(self, lab: Lab, guest: Guest) -> None:
        self.lab, self.guest = lab, guest

    def inside(self, line: str, seconds: float = 120) -> Done:
        return self.lab.on_host(f"pct exec {self.guest.vmid} -- sh -c {shlex.quote(line)}", seconds=seconds)

    def serves(self) -> bool:
        if self.inside(f"systemctl is-failed {UNIT}").returncode == 0:
            pytest.fail(self.inside(f"journalctl -u {UNIT} -n 60 --no-pager").stdout)
        return self.inside("curl -sf -m 5 http://127.0.0.1:30900/model_info").returncode == 0

    def processes(self) -> dict[str, list[str]]:
        """The unit's processes: what they are called → the device nodes that they hold."""
        listing = (
            f"for pid in $(cat {CGROUP}/cgroup.procs); do"
            " echo $(cat /proc/$pid/comm) $(readlink /proc/$pid/fd/* | grep ^/dev/nvidia); done"
        )
        rows = [line.split() for line in self.inside(listing).stdout.splitlines()]
        return {row[0] + (" tracker" if len(row) == 1 else ""): row[1:] for row in rows}


@pytest.fixture(scope="module")
def server(lab: Lab) -> Iterator[Server]:
    guest = next((guest for guest in lab.host.guests if guest.sglang), None)
    assert guest is not None, "no guest with the real SGLang: tests/lab/sglang_cpu/build, then lab up … --sglang"
    made = Server(lab, guest)
    started = made.inside(f"systemd-run --quiet --unit {UNIT} -E SPT_NOENV=1 -E NCCL_ALGO=Ring {SERVE}")
    assert started.returncode == 0, started
    try:
        poll(made.serves, 120, "the server", interval=0.5)
        yield made
    finally:
        made.inside(f"systemctl kill -s KILL {UNIT}; systemctl reset-failed {UNIT}")


def test_it_answers(server: Server) -> None:
    request = json.dumps({"text": "hello world", "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}})
    done = server.inside(f"curl -sf -m 60 http://127.0.0.1:30900/generate -d {shlex.quote(request)}"
                         " -H 'content-type: application/json'")  # fmt: skip
    answer = json.loads(done.stdout)
    assert answer["meta_info"]["completion_tokens"] == 8
    assert len(answer["output_ids"]) == 8


def test_its_processes_are_the_real_ones_and_hold_the_gpus(server: Server) -> None:
    nodes = [f"/dev/nvidia{gpu}" for gpu in server.guest.gpus] + ["/dev/nvidia-uvm", "/dev/nvidiactl"]
    found = server.processes()
    assert set(found) == {"python", "python tracker", "sglang::schedul", "sglang::detoken"}
    for name, held in found.items():
        assert sorted(held) == ([] if name == "python tracker" else sorted(nodes)), name


def test_its_workers_got_the_environment(server: Server) -> None:
    show = f"for pid in $(cat {CGROUP}/cgroup.procs); do tr '\\0' '\\n' < /proc/$pid/environ | grep NCCL_ALGO; done"
    assert server.inside(show).stdout == "NCCL_ALGO=Ring\n" * 4


def test_only_servers_open_gpus(server: Server) -> None:
    count = (
        "import glob, os, torch; print(sum('nvidia' in os.path.realpath(fd) for fd in glob.glob('/proc/self/fd/*')))"
    )
    assert server.inside(f"{PYTHON} -c {shlex.quote(count)}").stdout == "0\n"


def test_sglangs_own_benchmark_client(server: Server) -> None:
    done = server.inside(
        f"cd /tmp && {PYTHON} -m sglang.bench_serving --backend sglang --host 127.0.0.1 --port 30900"
        " --dataset-name random-ids --random-input-len 16 --random-output-len 8 --num-prompts 4"
        " --tokenizer /opt/sglang/models/tiny --output-file /tmp/bench.jsonl",
        seconds=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(server.inside("cat /tmp/bench.jsonl").stdout)["completed"] == 4


def test_it_ends_on_term(server: Server) -> None:
    assert server.inside(f"systemctl stop {UNIT}").returncode == 0
    assert server.inside(f"test -e {CGROUP}").returncode == 1
    assert server.inside("curl -s http://127.0.0.1:30900/model_info").returncode == 7
