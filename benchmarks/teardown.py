#!/usr/bin/env python3
# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How long playbooks/teardown.yml takes for one node with a server on eight GPUs, beside the shell line it replaces.

An embedded node (stand-in GPUs, the stand-in server) in a PID namespace of its own, so that the shell line can kill
nothing else. Each round starts the server anew for either, in turn. Prints medians and the ratios of the wall times: of
the playbook, of gpu_teardown and gpu_free alone (processes without Ansible around them), and of what these two spend at
work.

    benchmarks/teardown.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/lab"), str(ROOT / "tests/gpu")]

from embedded import space  # noqa: E402
from kit import methods  # noqa: E402

INSIDE = "CLEANSLATE_BENCHMARK_INSIDE"
#: The interpreter; under another name than its own Python does not find itself.
PYTHON = os.environ.get("CLEANSLATE_BENCHMARK_PYTHON", sys.executable)
PACKAGES = os.environ.get("CLEANSLATE_BENCHMARK_PACKAGES", sysconfig.get_path("purelib"))
GPUS = 8
#: Seconds for the server to come up.
READY = 120.0


class Node:
    """One node below a folder: eight GPUs, a model, and at most one server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dev, self.shm, self.tmp, self.lib, self.bin = (folder / n for n in ("dev", "shm", "tmp", "lib", "bin"))
        model = folder / "model"
        for path in (self.dev, self.shm, self.tmp, self.lib, self.bin, model):
            path.mkdir()
        for name in [*("nvidia%d" % number for number in range(GPUS)), "nvidiactl", "nvidia-uvm"]:
            (self.dev / name).write_bytes(bytes(4096))
        (model / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
        subprocess.run(["make", "-s", "-C", str(ROOT / "tests/lab/nvml"), "OUT=%s" % self.lib], check=True)
        smi = self.bin / "nvidia-smi"
        smi.write_text('#!/bin/sh\nexec "%s" "%s" "$@"\n' % (PYTHON, ROOT / "tests/gpu/simulated/nvidia-smi"))
        smi.chmod(0o755)
        (self.bin / "python3").symlink_to(os.path.realpath(PYTHON))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("ANSIBLE_", "CUDA_", "FAKE_"))},
            "PATH": "%s:%s" % (self.bin, os.environ["PATH"]),
            "LD_LIBRARY_PATH": str(self.lib),
            "FAKE_NVML_DEV_DIR": str(self.dev),
            "FAKE_NVML_CONF": "/dev/null",
        }
        self.inventory = folder / "hosts.json"
        self.inventory.write_text(json.dumps({"gpu_nodes": {"hosts": {"node": self.variables()}}}))

    def variables(self) -> dict[str, object]:
        return {
            "ansible_connection": "local",
            "ansible_python_interpreter": PYTHON,
            "cleanslate_report": str(self.folder / "report.json"),
            "cleanslate_state_dir": str(self.folder / "state"),
            "cleanslate_run_dir": str(self.folder / "run"),
            "gpu_node_dev_dir": str(self.dev),
            "gpu_teardown_shm_dir": str(self.shm),
            "gpu_teardown_tmp_dir": str(self.tmp),
            "gpu_teardown_ports": [self.port],
        }

    def serve(self) -> subprocess.Popen[bytes]:
        """Start the server and wait until it answers."""
        environment = {
            **self.environment,
            # As people call it, and with what is installed beside the interpreter that runs this.
            "PYTHONPATH": "%s:%s" % (ROOT / "tests/lab/standin", PACKAGES),
            "SPT_NOENV": "1",
            "STANDIN_DEV_DIR": str(self.dev),
            "STANDIN_SHM_DIR": str(self.shm),
            "STANDIN_TMP_DIR": str(self.tmp),
            "STANDIN_SPEED": "20",
        }
        words = ["-m", "sglang.launch_server", "--model-path", str(self.folder / "model"), "--tp-size", str(GPUS)]
        with (self.folder / "server.log").open("ab") as log:
            server = subprocess.Popen(
                [str(self.bin / "python3"), *words, "--port", str(self.port)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until = time.monotonic() + READY
        while time.monotonic() < until and server.poll() is None:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=5):
                    pass
            except OSError:
                time.sleep(0.05)
                continue
            if len(self.workers()) == GPUS:
                return server
        sys.exit("The server did not come up:\n" + (self.folder / "server.log").read_text()[-2000:])

    @staticmethod
    def workers() -> set[int]:
        """The scheduler processes that live."""
        out = set()
        for name in os.listdir("/proc"):
            try:
                words = Path("/proc", name, "cmdline").read_bytes() if name.isdigit() else b""
            except OSError:
                continue
            if words.startswith(b"sglang::scheduler"):
                out.add(int(name))
        return out


def playbook(node: Node) -> float:
    """The playbook, from the command to its end; it must have proven the GPUs free."""
    environment = {**node.environment, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_HOME": str(node.folder)}
    environment["ANSIBLE_LOCAL_TEMP"] = environment["ANSIBLE_REMOTE_TEMP"] = str(node.folder / "ansible")
    command = [PYTHON, "-m", "ansible", "playbook", "-i", str(node.inventory)]
    command.append(str(ROOT / "playbooks/teardown.yml"))
    started = time.perf_counter()
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    took = time.perf_counter() - started
    report = json.loads((node.folder / "report.json").read_text()) if done.returncode == 0 else {}
    if not report or report["nodes"][0]["outcome"] != "free" or node.workers():
        sys.exit("The playbook did not do it:\n" + done.stdout + done.stderr)
    return took


def modules(node: Node) -> tuple[float, float]:
    """What the shell line does, by the modules without Ansible around them: from the start of the first process to the
    end of the second, and how much of that they spend at work rather than in being loaded."""
    common = {"dev_dir": str(node.dev), "state_dir": str(node.folder / "state"), "run_dir": str(node.folder / "run")}
    order = {"python": PYTHON, "record": ""}
    started = time.perf_counter()
    ended = methods.call(order, "gpu_teardown", {**common, "scope": "match", "ports": [node.port]}, node.environment)
    proof = methods.call(order, "gpu_free", common, node.environment)
    took = time.perf_counter() - started
    if ended.get("failed") or proof.get("verdict") != "free" or node.workers():
        sys.exit("The modules did not do it:\n%s\n%s" % (ended, proof))
    return took, ended["inside"] + proof["inside"]


def shell(node: Node) -> float:
    """What was typed instead; its number must say what is true, here it can."""
    script = node.folder / "clean.sh"
    count = node.folder / "count"
    lines = methods.SHELL_LINES.replace("FUSER", "fuser -k %s/nvidia*" % node.dev).replace("COUNT", str(count))
    script.write_text(lines)
    started = time.perf_counter()
    subprocess.run(["bash", str(script)], env=node.environment, capture_output=True, check=False)
    took = time.perf_counter() - started
    if int(count.read_text()) != GPUS or node.workers():
        sys.exit("The shell line did not do it.")
    return took


def cpu() -> float:
    """Processor time of everything that was started and has ended: on a busy machine it tells more than the clock."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(rounds: int) -> None:
    times: dict[str, list[float]] = {}
    processor: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="node-") as name:
        node = Node(Path(name))
        for _ in range(rounds):
            for way, run in (("shell line", shell), ("teardown.yml", playbook), ("modules alone", modules)):
                server = node.serve()
                before = cpu()
                took = run(node)
                processor.setdefault(way, []).append(cpu() - before)
                server.wait(30)
                whole, inside = took if isinstance(took, tuple) else (took, None)
                times.setdefault(way, []).append(whole)
                if inside is not None:
                    times.setdefault("at work", []).append(inside)
    print("one node, a server on %d GPUs, %d rounds in turn" % (GPUS, rounds))
    medians = {way: statistics.median(values) for way, values in times.items()}
    for way, values in times.items():
        work = ", %.2f s of processor time" % statistics.median(processor[way]) if way in processor else ""
        print("%-14s %6.2f s (%.2f-%.2f)%s" % (way, medians[way], min(values), max(values), work))
    for way in ("teardown.yml", "modules alone", "at work"):
        print("ratio %-14s / shell line %5.2f" % (way, medians[way] / medians["shell line"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if os.environ.get(INSIDE) == "child":
        del os.environ[INSIDE], os.environ["PYTHONHOME"]
        measure(options.rounds)
        return 0
    if os.environ.get(INSIDE):
        return first_process()
    command = space.unshare()
    if command is None:
        parser.error("no PID namespace can be made here, and the shell line would reach other people's processes")
    words = [*command, PYTHON, *sys.argv]
    environment = {**os.environ, INSIDE: "init"}
    environment.update(CLEANSLATE_BENCHMARK_PYTHON=PYTHON, CLEANSLATE_BENCHMARK_PACKAGES=PACKAGES)
    return subprocess.run(words, env=environment, check=False).returncode


def first_process() -> int:
    """Reap whoever is left to the namespace; the benchmark itself goes by a name that the shell line does not know."""
    environment = {**os.environ, INSIDE: "child", "PYTHONHOME": sys.base_prefix}
    child = os.posix_spawn(os.path.realpath(PYTHON), ["benchmark", *sys.argv], environment)
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status) & 0xFF


if __name__ == "__main__":
    sys.exit(main())
