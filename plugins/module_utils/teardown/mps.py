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
from .units import enter

CONTROL = "nvidia-cuda-mps-control"
#: What a guest's first process may be called: who runs it is the guest's root.
_FIRST = ("systemd", "init")


class Daemon(t.NamedTuple):
    """A control daemon, and the LXC container in which it runs (empty: where we run)."""

    process: Process
    container: str = ""


def control_daemons(
    processes: t.Iterable[Process], container_of: t.Callable[[Process], str | None] = lambda process: ""
) -> list[Daemon]:
    """The control daemons among them: those of root, of this very user, and of a guest's root. A stranger's is not
    talked to.

    C(container_of): the LXC container of a process, empty for our own, None for one that is none of our business.
    """
    found = []
    roots: dict[str, int | None] = {}
    for process in processes:
        if process.zombie:
            continue
        first = len(process.nspid) > 1 and process.nspid[-1] == 1 if process.comm in _FIRST else False
        named = process.comm == CONTROL[:15] and CONTROL in program_names(process)
        if not first and not named:
            continue
        container = container_of(process)
        if container is None:
            continue
        if first and container:
            roots[container] = process.uid
        if named:
            found.append(Daemon(process, container))
    trusted = (0, os.geteuid())
    return [
        daemon
        for daemon in found
        if daemon.process.uid in trusted
        or (daemon.container and daemon.process.uid is not None and daemon.process.uid == roots.get(daemon.container))
    ]


class Mps:
    """The control program, called without a shell: the seam that tests replace."""

    #: Seconds that an answer may take.
    patience = 5.0

    def _ask(self, daemon: Daemon, command: str) -> list[str] | None:
        """The lines of an answer; None when there is none."""
        # The program on our own path (or the guest's), not the file that the daemon runs.
        program = CONTROL if daemon.container else shutil.which(CONTROL)
        if program is None:
            return None
        words = [program]
        environment = {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C"}
        folder = (daemon.process.environ or {}).get("CUDA_MPS_PIPE_DIRECTORY")
        if daemon.container:
            # Not every way into a container hands variables on.
            setting = ["env", "CUDA_MPS_PIPE_DIRECTORY=" + folder] if folder else []
            words = [*enter(daemon.container), *setting, program]
        elif folder:
            environment["CUDA_MPS_PIPE_DIRECTORY"] = folder
        try:
            done = subprocess.run(  # pylint: disable=ansible-bad-function
                words,
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

    def _pids(self, daemon: Daemon, command: str) -> list[int]:
        lines = self._ask(daemon, command) or []
        return [int(line) for line in (line.strip() for line in lines) if line.isdigit() and int(line) > 1]

    def terminate(self, daemon: Daemon, pids: t.Collection[int]) -> list[str]:
        """End the work of those of C(pids) that are clients; pids as they are where the daemon runs. Returns warnings:
        what did not work."""
        warnings = []
        for server in self._pids(daemon, "get_server_list"):
            for client in self._pids(daemon, "get_client_list %d" % server):
                if client in pids and self._ask(daemon, "terminate_client %d %d" % (server, client)) is None:
                    warnings.append(
                        "The MPS control daemon %d (%s) did not end the work of its client %d; other clients of its "
                        "server may fail." % (daemon.process.pid, show(daemon.process.comm), client)
                    )
        return warnings
