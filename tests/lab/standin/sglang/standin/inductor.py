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


class Pool:
    """The pool of one scheduler. It notices that one's end by the pipe that closes."""

    def __init__(self):
        workers = int(settings.number("INDUCTOR_WORKERS", 2))
        reading, self.writing = os.pipe()
        self.answers, answering = os.pipe()
        command = [
            sys.executable, POOL, "--pickler=torch._inductor.compile_worker.subproc_pool.SubprocPickler", "--kind=fork",
            f"--workers={workers}", f"--parent={os.getpid()}", f"--read-fd={reading}", f"--write-fd={answering}",
        ]  # fmt: skip
        self.process = subprocess.Popen(command, pass_fds=[reading, answering], stdin=subprocess.DEVNULL)
        os.close(reading)
        os.close(answering)

    def wait_until_up(self):
        """All of its workers hold the nodes."""
        if not os.read(self.answers, 1):
            raise OSError(f"the inductor pool ended with {self.process.wait()}")
