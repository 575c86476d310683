# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The embedded node: folders and files that stand for a machine with eight GPUs."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
HOME = ROOT / "build" / "demo"
GPUS = 8
#: The first of these that nobody listens on is the server's: two demos on a machine must not meet.
PORTS = range(30990, 31010)
INSTANCE_GPUS = (0, 1, 2, 3)

DEV, SHM, TMP, LIB, MODELS, LOGS = (HOME / name for name in ("dev", "shm", "tmp", "lib", "models", "logs"))


def choose_port() -> int:
    """A port that nobody listens on, on loopback. Raises OSError when there is none."""
    for port in PORTS:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"ports {PORTS[0]} to {PORTS[-1]} of this machine are all taken")


def make() -> None:
    """Build the node anew. Only what lies below build/demo is ever removed."""
    if HOME.exists():
        shutil.rmtree(HOME)
    for folder in (DEV, SHM, TMP, LIB, MODELS, LOGS):
        folder.mkdir(parents=True)
    for name in [f"nvidia{n}" for n in range(GPUS)] + ["nvidiactl", "nvidia-uvm"]:
        (DEV / name).write_bytes(bytes(4096))
    library, source = str(LIB / "libnvidia-ml.so.1"), str(ROOT / "tests/lab/nvml/fake_nvml.c")
    compiler = os.environ.get("CC", "cc")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O2", "-Wl,-soname,libnvidia-ml.so.1", "-o", library, source], check=True
    )
    for name, architecture in (("target", "LlamaForCausalLM"), ("draft", "LlamaForCausalLMEagle3")):
        (MODELS / name).mkdir()
        config = {"architectures": [architecture], "model_type": "llama", "max_position_embeddings": 4096}
        (MODELS / name / "config.json").write_text(json.dumps(config))
        # Nobody reads them; the plan wants to see that a model has weights.
        (MODELS / name / "model.safetensors").write_bytes(bytes(8))


def environment() -> dict[str, str]:
    """What processes of the node need in order to see the stand-in GPUs."""
    return {
        "LD_LIBRARY_PATH": str(LIB),
        "FAKE_NVML_DEV_DIR": str(DEV),
        "STANDIN_DEV_DIR": str(DEV),
        "STANDIN_SHM_DIR": str(SHM),
        "STANDIN_TMP_DIR": str(TMP),
    }


def litter(dead_pid: int) -> None:
    """What a server that was killed leaves: a stale socket, shared memory stamped with a pid that is gone."""
    (SHM / f"sgl_shm_mq_{dead_pid}_0a1b2c3d").write_bytes(bytes(1 << 20))
    (SHM / "sglang_loads_0a1b2c3d_4e5f.shm").write_bytes(bytes(16396))
    with socket.socket(socket.AF_UNIX) as stale:
        # A socket's path may not be longer than 107 bytes: bind it by a short relative name.
        here = os.getcwd()
        os.chdir(TMP)
        try:
            stale.bind("tmpq1w2e3r4")
        finally:
            os.chdir(here)
    # Files that carry no pid are only swept once they are a minute old.
    an_hour_ago = time.time() - 3600
    for path in [*SHM.iterdir(), *TMP.iterdir()]:
        os.utime(path, (an_hour_ago, an_hour_ago))


def python() -> str:
    return sys.executable
