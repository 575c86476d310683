# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Clients of CUDA's Multi-Process Service: their work on the GPU is ended by its control daemon before they are.

A client that is killed with work in flight can take the shared server, and so every other client, with it
(NVIDIA, Multi-Process Service, "Client Early Termination"; sgl-project/sglang-omni#1635).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import typing as t

from ..common.text import show
from ..gpu.safe import program_names
from ..proc.table import Process

CONTROL = "nvidia-cuda-mps-control"


def control_daemons(processes: t.Iterable[Process]) -> list[Process]:
    """The control daemons among them: those of root and of this very user. A stranger's is not talked to."""
    trusted = (0, os.geteuid())
    return [
        process
        for process in processes
        if process.comm == CONTROL[:15]
        and not process.zombie
        and CONTROL in program_names(process)
        and process.uid in trusted
    ]


class Mps:
    """The control program, called without a shell: the seam that tests replace."""

    #: Seconds that an answer may take.
    patience = 5.0

    def _ask(self, daemon: Process, command: str) -> list[str] | None:
        """The lines of an answer; None when there is none."""
        # The program on our own path, not the file that the daemon runs.
        program = shutil.which(CONTROL)
        if program is None:
            return None
        environment = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C"}
        folder = (daemon.environ or {}).get("CUDA_MPS_PIPE_DIRECTORY")
        if folder:
            environment["CUDA_MPS_PIPE_DIRECTORY"] = folder
        try:
            done = subprocess.run(
                [program],
                input=(command + "\n").encode("ascii"),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                timeout=self.patience,
                env=environment,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode != 0:
            return None
        return done.stdout.decode("utf-8", "surrogateescape").split("\n")

    def _pids(self, daemon: Process, command: str) -> list[int]:
        lines = self._ask(daemon, command) or []
        return [int(line) for line in (line.strip() for line in lines) if line.isdigit() and int(line) > 1]

    def terminate(self, daemon: Process, pids: t.Collection[int]) -> list[str]:
        """End the work of those of C(pids) that are clients. Returns warnings: what did not work."""
        warnings = []
        for server in self._pids(daemon, "get_server_list"):
            for client in self._pids(daemon, "get_client_list %d" % server):
                if client in pids and self._ask(daemon, "terminate_client %d %d" % (server, client)) is None:
                    warnings.append(
                        "The MPS control daemon %d (%s) did not end the work of its client %d; other clients of its "
                        "server may fail." % (daemon.pid, show(daemon.comm), client)
                    )
        return warnings
