# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The three ways to clean up, each from its own start to its own verdict."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .states import State

OURS, SHELL, KILLALL = "modules", "shell", "killall"
TITLES = {
    OURS: "gpu_teardown + gpu_free",
    SHELL: "the shell line",
    KILLALL: "SGLang's killall",
}
#: What is typed by hand, a line a step. The number at the end is read by eye: as many as there are GPUs is clean. On
#: the screen it stands right behind fuser's PIDs; to be fair, it is taken from the pipe.
SHELL_LINES = """\
ps aux | grep python3 | grep -v grep | awk '{print $2}' | xargs -r kill -9
FUSER
sleep 3
nvidia-smi | grep "0MiB" | wc -l | tee COUNT
"""
#: Seconds that SGLang's killall may take: it waits up to 100 s for memory that nobody gives back.
PATIENCE = 120.0


def run(method: str, state: State, order: Mapping[str, Any]) -> dict[str, Any]:
    return {OURS: ours, SHELL: shell, KILLALL: killall}[method](state, order)


def params(order: Mapping[str, Any], state: State) -> dict[str, Any]:
    """Options of the modules; what is not named here has the module's default (ours.py)."""
    folder = Path(order["folder"])
    return {
        "devices": list(state.devices),
        "dev_dir": order["dev_dir"],
        "state_dir": str(folder / "state"),
        "run_dir": str(folder / "run"),
        "pynvml_path": order["pynvml_path"],
        **{name: value for name, value in state.options.items() if name == "protect"},
    }


def call(
    order: Mapping[str, Any],
    module: str,
    options: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """One module, in a process of its own as Ansible starts it."""
    request = {"module": module, "params": dict(options), "record": ""}
    if order["record"]:
        request["record"] = str(Path(order["record"]) / ("%s.%s.json" % (order["state"], module)))
    started = time.monotonic()
    with subprocess.Popen(
        [order["python"], str(Path(__file__).with_name("ours.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(request))
        process.stdin.close()
        line = process.stdout.readline()
        took = time.monotonic() - started
        # It may still write its recording.
        process.wait()
    if not line:
        return {"failed": True, "msg": "%s ended with %d" % (module, process.returncode), "seconds": took}
    return {**json.loads(line), "seconds": took}


def ours(state: State, order: Mapping[str, Any]) -> dict[str, Any]:
    """Tear down and prove free: two modules, one after the other. Their times alone count, not what a recording takes
    after each."""
    options = params(order, state)
    ending = dict(options, scope=state.scope, term_timeout=state.options.get("term_timeout", 10.0))
    teardown = call(order, "gpu_teardown", ending)
    proof = call(order, "gpu_free", dict(options, timeout=order["free_timeout"]))
    verdict = {"free": "free", "busy": "not free"}.get(proof.get("verdict", ""), "unknown")
    return {
        "verdict": "unknown" if teardown.get("failed") else verdict,
        "wall": teardown["seconds"] + proof["seconds"],
        "said": proof.get("msg", ""),
        "reasons": proof.get("reasons", []),
        "teardown": {key: teardown.get(key) for key in ("seconds", "elapsed", "killed", "spared", "msg", "warnings")},
        "proof": {key: proof.get(key) for key in ("seconds", "waited", "polls", "msg", "nvml_processes")},
    }


def shell(state: State, order: Mapping[str, Any]) -> dict[str, Any]:
    fuser = shutil.which("fuser")
    line = "fuser -k %s/nvidia*" % order["dev_dir"] if fuser else ": no fuser here"
    script = Path(order["folder"]) / "clean.sh"
    count = Path(order["folder"]) / "count"
    script.write_text(SHELL_LINES.replace("FUSER", line).replace("COUNT", str(count)))
    started = time.monotonic()
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
    took = time.monotonic() - started
    number = count.read_text().strip()
    words = done.stdout.split()
    clean = number.isdigit() and int(number) == order["gpus"]
    return {
        "verdict": "free" if clean else "not free",
        "wall": took,
        "said": "%s of %d" % (number, order["gpus"]),
        "on_screen": words[-1] if words else "",
        "fuser": bool(fuser),
        "output": (done.stdout + done.stderr)[-2000:],
    }


def killall(state: State, order: Mapping[str, Any]) -> dict[str, Any]:
    environment = {**os.environ, "SGLANG_IS_IN_CI": "true"}
    if state.devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(state.devices)
    started = time.monotonic()
    try:
        done = subprocess.run(
            [order["python"], order["killall"]],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"verdict": "unknown", "wall": PATIENCE, "said": "no end within %g s" % PATIENCE}
    took = time.monotonic() - started
    last = [line.strip("│ ") for line in done.stdout.splitlines() if "PASS" in line or "FAIL" in line or "SKIP" in line]
    return {
        "verdict": {0: "free", 1: "not free"}.get(done.returncode, "unknown"),
        "wall": took,
        "said": last[-1] if last else (done.stdout + done.stderr)[-300:],
        "output": done.stdout[-4000:],
    }
