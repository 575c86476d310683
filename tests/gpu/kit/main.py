# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Conduct the trials: refuse or go on, one namespace a trial, the truth from outside, the results."""

from __future__ import annotations

import argparse
import ctypes
import datetime
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from . import report, stage, states
from .meter import IDLE, MIB, Meter
from .methods import KILLALL, OURS, SHELL
from .states import State

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parents[1]
SIMULATED = "GPU_TEST_SIMULATED"
#: MiB, and seconds between the first look of the waiting check and the signal: other phases of its looks each time.
DEATHS = [(4096, 0.00), (40960, 0.03), (102400, 0.06)] * 3
#: A trial that takes longer has gone wrong.
LIMIT = 150.0


class Refused(Exception):
    """This machine is not to be touched."""


def arguments(words: list[str], text: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true", help="stand-in GPUs instead of real ones")
    parser.add_argument("--states", default="", metavar="A,B", help="these starting states only")
    parser.add_argument("--methods", default="", metavar="A,B", help="of modules, shell, killall; default all")
    parser.add_argument("--rounds", type=int, default=3, help="how often the modules do each state (default 3)")
    parser.add_argument("--deaths", type=int, default=len(DEATHS), help="measurements from signal to verdict")
    parser.add_argument("--killall", default="", help="SGLang's cli/killall.py, or a wheel of sglang that has it")
    parser.add_argument("--pynvml", default="", help="folder with pynvml.py, where Python has no nvidia-ml-py")
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu", help="folder of the results")
    return parser.parse_args(words)


def main(words: list[str], text: str) -> int:
    options = arguments(words, text)
    try:
        if options.simulate and SIMULATED not in os.environ:
            return simulate(words)
        return conduct(options)
    except Refused as error:
        print("Refused: %s" % error, file=sys.stderr)
        return 2


# -- the stand-in machine --------------------------------------------------------------------------------------------


def simulate(words: list[str]) -> int:
    """Start over in a PID namespace with two stand-in GPUs."""
    command = namespace()
    with tempfile.TemporaryDirectory(prefix="gpu-test-") as name:
        folder = Path(name)
        dev, binaries = folder / "dev", folder / "bin"
        dev.mkdir()
        binaries.mkdir()
        for node in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
            (dev / node).write_bytes(bytes(4096))
        (folder / "fake.conf").touch()
        smi = binaries / "nvidia-smi"
        smi.write_text('#!/bin/sh\nexec "%s" "%s" "$@"\n' % (sys.executable, HERE / "simulated/nvidia-smi"))
        smi.chmod(0o755)
        subprocess.run(["make", "-s", "-C", str(ROOT / "tests/lab/nvml"), "OUT=%s" % folder], check=True)
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("CUDA_", "FAKE_"))}
        environment.update(
            {
                SIMULATED: str(dev),
                "GPU_TEST_DEV_DIR": str(dev),
                "LD_LIBRARY_PATH": str(folder),
                "FAKE_NVML_DEV_DIR": str(dev),
                "FAKE_NVML_CONF": str(folder / "fake.conf"),
                "FAKE_NVML_STATE_DIR": str(folder),
                "FAKE_NVML_LAG_MS": "150",
                "PATH": "%s:%s" % (binaries, os.environ.get("PATH", os.defpath)),
            }
        )
        return subprocess.run(
            [*command, sys.executable, str(HERE / "run"), *words], env=environment, check=False
        ).returncode


# -- may we? ---------------------------------------------------------------------------------------------------------


def namespace() -> list[str]:
    try:
        return stage.own_namespace()[1:]
    except stage.Failed as error:
        raise Refused("%s, and without one the compared tools would reach other people's processes." % error) from None


def binding(path: str) -> Any:
    if path:
        sys.path.insert(0, path)
        os.environ["PYTHONPATH"] = path
    try:
        import pynvml
    except ImportError:
        raise Refused("Python has no nvidia-ml-py here: name the folder of pynvml.py with --pynvml.") from None
    return pynvml


def check_machine(meter: Meter, dev_dir: str, simulated: bool) -> None:
    """Refuse where somebody uses a GPU."""
    sys.path.insert(0, str(ROOT / ".collections"))
    from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.rows import holder_rows
    from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.survey import SurveyOptions, take_survey

    if not simulated:
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Refused("the driver's libcuda is not there (%s)." % error) from None
    survey = take_survey(SurveyOptions(dev_dir=dev_dir, pynvml_path=""))
    rows = holder_rows(survey)
    if rows:
        raise Refused(
            "GPUs are in use by %s." % ", ".join("PID %(pid)d (%(user)s: %(cmdline)s)" % row for row in rows[:5])
        )
    check_idle(meter)
    for gpu in survey.nvml.gpus:
        if gpu.mig is not None:
            raise Refused("GPU %d is in MIG mode: these trials are made for whole GPUs." % gpu.index)
        if gpu.compute_mode not in (0, 3, None):
            raise Refused("GPU %d has a compute mode under which nothing can be started." % gpu.index)


def check_idle(meter: Meter) -> None:
    if not meter.wait_idle(20):
        raise Refused("GPU memory is in use: %s MiB." % ", ".join(str(used // MIB) for used in meter.memory()))
    listed = meter.processes()
    if listed:
        raise Refused("GPU %d is in use: NVML lists process %d." % listed[0])


def find_killall(given: str, folder: Path) -> str:
    """SGLang's script: as given, out of a wheel, or of the SGLang that is installed; empty when there is none."""
    if given.endswith(".whl"):
        with zipfile.ZipFile(given) as wheel:
            return wheel.extract("sglang/cli/killall.py", folder)
    if given:
        return str(Path(given).resolve())
    spec = importlib.util.find_spec("sglang")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if (Path(place) / "cli/killall.py").exists():
            return str(Path(place) / "cli/killall.py")
    return ""


# -- the trials ------------------------------------------------------------------------------------------------------


class Conductor:
    def __init__(self, options: argparse.Namespace, meter: Meter, folder: Path) -> None:
        self.options = options
        self.meter = meter
        self.folder = folder
        self.simulated = bool(options.simulate)
        self.command = namespace()
        self.killall = find_killall(options.killall, folder)
        self.recordings = options.out / "recordings"
        self.recordings.mkdir(parents=True, exist_ok=True)
        self.number = 0

    def order(self, state: str, method: str, record: bool, **more: Any) -> Path:
        self.number += 1
        folder = self.folder / ("%d-%s-%s" % (self.number, state, method))
        folder.mkdir()
        path = folder / "order.json"
        path.write_text(
            json.dumps(
                {
                    "state": state,
                    "method": method,
                    "folder": str(folder),
                    "simulate": self.simulated,
                    "dev_dir": os.environ.get(SIMULATED, "/dev"),
                    "pynvml_path": self.options.pynvml,
                    "python": sys.executable,
                    "killall": self.killall,
                    "gpus": self.meter.count,
                    "free_timeout": 3.0,
                    "linger": 0.3 if self.simulated else 0.1,
                    "record": str(self.recordings) if record else "",
                    **more,
                }
            )
        )
        return path

    def run(self, order: Path) -> dict[str, Any]:
        """One namespace from its beginning to its end."""
        if self.simulated:
            Path(os.environ["FAKE_NVML_CONF"]).write_text("")
        command = [*self.command, sys.executable, stage.ENTRY, str(order)]
        try:
            subprocess.run(command, stdin=subprocess.DEVNULL, timeout=LIMIT, check=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            return {"failed": str(error)}
        return json.loads(order.with_name("result.json").read_text())

    def trial(self, state: State, method: str, record: bool) -> dict[str, Any]:
        check_idle(self.meter)
        order = self.order(state.name, method, record)
        outside = stage.Cast(order.parent, self.simulated)
        try:
            for actor in state.actors:
                if actor.outside:
                    process = outside.start(actor)
                    outside.enter(actor, process)
            result = self.run(order)
            if "failed" in result:
                return {"state": state.name, "method": method, "failed": result["failed"]}
            for watched in outside.watched:
                result["processes"].append(
                    {"label": watched.label, "pid": watched.pid, "may_end": False, "ended": watched.ended}
                )
            return self.judged(state, result)
        finally:
            for process in outside.started:
                process.kill()
                process.wait()

    def judged(self, state: State, result: dict[str, Any]) -> dict[str, Any]:
        """What is true of the moment of the verdict, and what the tool made of it."""
        memory = self.meter.at(result["finished"])
        targets = [int(name) for name in state.devices] or list(range(self.meter.count))
        left = [row["label"] for row in result["processes"] if row["may_end"] and row["ended"] is None]
        free = not left and all(memory[gpu] <= IDLE for gpu in targets)
        result.update(
            memory_mib=[used // MIB for used in memory],
            truth="free" if free else "not free",
            left_over=left,
            wrongly_killed=[
                row["label"] for row in result["processes"] if not row["may_end"] and row["ended"] is not None
            ],
            right=None if result["verdict"] == "unknown" else (result["verdict"] == "free") == free,
        )
        return result

    def deaths(self, record: bool) -> list[dict[str, Any]]:
        """From the signal to the verdict."""
        check_idle(self.meter)
        wanted = [DEATHS[number % len(DEATHS)] for number in range(self.options.deaths)]
        biggest = min(self.meter.machine()["memory_mib"]) * 8 // 10
        result = self.run(self.order("watch", "watch", record, deaths=[(min(mib, biggest), p) for mib, p in wanted]))
        if "failed" in result:
            raise Refused(result["failed"])
        for death in result["deaths"]:
            death["back"] = self.meter.back(0, death["signalled"])
        return result["deaths"]


def plan(options: argparse.Namespace, gpus: int, killall: str) -> list[tuple[State, str, bool]]:
    """State, method, and whether it is recorded: the tools take turns on each state."""
    wanted = options.methods.split(",") if options.methods else [OURS, SHELL, KILLALL]
    peers = [method for method in (SHELL, KILLALL) if method in wanted and (method != KILLALL or killall)]
    out: list[tuple[State, str, bool]] = []
    for state in states.named(options.states):
        if state.gpus > gpus:
            continue
        for number in range(options.rounds if OURS in wanted else 0):
            out.append((state, OURS, number == 0))
            out += [(state, method, False) for method in peers[number : number + 1]]
        out += [(state, method, False) for method in peers[options.rounds if OURS in wanted else 0 :]]
    return out


def conduct(options: argparse.Namespace) -> int:
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    pynvml = binding(options.pynvml)
    try:
        meter = Meter(pynvml, 0.025 if options.simulate else 0.002)
    except pynvml.NVMLError as error:
        raise Refused("NVML does not answer: %s." % error) from None
    check_machine(meter, os.environ.get(SIMULATED, "/dev"), options.simulate)
    meter.start()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-trials-") as name:
        conductor = Conductor(options, meter, Path(name))
        facts = {
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
            "simulated": bool(options.simulate),
            "kernel": platform.release(),
            "processors": os.cpu_count(),
            "python": platform.python_version(),
            "fuser": bool(shutil.which("fuser")),
            "killall": bool(conductor.killall),
            **meter.machine(),
        }
        if not facts["fuser"]:
            print("There is no fuser here: the shell line goes without it.", flush=True)
        if not conductor.killall:
            print("SGLang's killall is not at hand (--killall): compared with the shell line alone.", flush=True)
        deaths = conductor.deaths(True) if options.deaths else []
        trials = []
        for state, method, record in plan(options, meter.count, conductor.killall):
            trials.append(conductor.trial(state, method, record))
            print(report.line(trials[-1]), flush=True)
            (options.out / "results.json").write_text(
                json.dumps({**facts, "trials": trials, "deaths": deaths}, indent=1)
            )
    meter.stop()
    results = {**facts, "seconds": round(time.monotonic() - began, 1), "trials": trials, "deaths": deaths}
    (options.out / "results.json").write_text(json.dumps(results, indent=1))
    text = report.document(results)
    (options.out / "results.md").write_text(text)
    print("\n" + text)
    wrong = report.failures(results)
    for problem in wrong:
        print("Not as it should be: %s" % problem, file=sys.stderr)
    return 1 if wrong else 0
