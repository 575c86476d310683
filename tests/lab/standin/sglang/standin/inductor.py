# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The torch-inductor pool that speculation starts in each scheduler: one pool process and its workers, all of which
hold the device nodes and carry no title. STANDIN_INDUCTOR_WORKERS (2) stands for one worker a core.
"""

from __future__ import annotations

import os
import subprocess
import sys

from sglang.standin import settings

HERE = os.path.dirname(os.path.abspath(__file__))
POOL = os.path.join(HERE, "site", "torch", "_inductor", "compile_worker", "__main__.py")


def start():
    """Start the pool. It notices its scheduler's end by the pipe that closes; keep what is returned."""
    workers = int(settings.number("INDUCTOR_WORKERS", 2))
    reading, writing = os.pipe()
    command = [
        sys.executable, POOL, "--pickler=torch._inductor.compile_worker.subproc_pool.SubprocPickler", "--kind=fork",
        f"--workers={workers}", f"--parent={os.getpid()}", f"--read-fd={reading}",
    ]  # fmt: skip
    pool = subprocess.Popen(command, pass_fds=[reading], stdin=subprocess.DEVNULL)
    os.close(reading)
    return pool, writing
