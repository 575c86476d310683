# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Real processes that hold stand-in GPUs: plain files in a folder of the test's own.

Only processes that were started here, and their descendants, are ever looked at.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.nvml import NvmlSnapshot
from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.survey import SurveyOptions, Surveyor
from ansible_collections.cleanslate.inference.plugins.module_utils.proc.table import ProcFS, descendants
from ansible_collections.cleanslate.inference.plugins.module_utils.teardown.reader import Reader
from ansible_collections.cleanslate.inference.plugins.module_utils.teardown.run import Seams, tear_down

#: What a holder runs: map the named files, open the others, say so, wait.
HOLD = """
import mmap, os, signal, sys, time
mapped = [os.open(path, os.O_RDWR) for path in sys.argv[1].split(":") if path]
maps = [mmap.mmap(fd, 4096) for fd in mapped]
opened = [os.open(path, os.O_RDWR) for path in sys.argv[2].split(":") if path]
%s
print("ready", flush=True)
while True:
    signal.pause()
"""


class BlindNvml:
    """No driver here: everything is told by /proc."""

    child_pid = 0

    def snapshot(self) -> NvmlSnapshot:
        return NvmlSnapshot()

    def close(self) -> None:
        pass


class QuietReader(Reader):
    def check(self) -> None:
        pass


class Holders:
    def __init__(self, folder: Path, gpus: int = 4) -> None:
        self.folder = folder
        self.dev = folder / "dev"
        self.dev.mkdir()
        for name in [*("nvidia%d" % number for number in range(gpus)), "nvidiactl", "nvidia-uvm"]:
            (self.dev / name).write_bytes(b"\0" * 4096)
        self.nvml: Any = BlindNvml()
        self.started: list[subprocess.Popen[bytes]] = []
        #: Grandchildren that outlive their parents.
        self.orphans: set[int] = set()

    def node(self, number: int) -> str:
        return str(self.dev / ("nvidia%d" % number))

    def start(
        self,
        argv: Sequence[str] | None = None,
        maps: Sequence[int] = (),
        opens: Sequence[int] = (),
        title: str | None = None,
        extra: str = "",
        environ: dict[str, str] | None = None,
        group: bool = False,
        cwd: Path | None = None,
        lines: int = 1,
    ) -> subprocess.Popen[bytes]:
        """Start a holder and wait until it holds. C(lines=0): the test reads what it prints."""
        words = list(argv) if argv is not None else [title or sys.executable, "-c", HOLD % extra]
        words += [":".join(map(self.node, maps)), ":".join(map(self.node, opens))]
        process = subprocess.Popen(
            words,
            executable=sys.executable,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={"PATH": os.environ["PATH"], **(environ or {})},
            start_new_session=group,
            cwd=cwd,
        )
        self.started.append(process)
        if lines:
            self.line(process, b"ready")
        return process

    @staticmethod
    def line(process: subprocess.Popen[bytes], expected: bytes | None = None) -> bytes:
        """The next line that a holder prints."""
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert expected is None or line == expected
        return line

    def pids(self) -> list[int]:
        """Those started here and all below them, whatever their parent is by now."""
        table = ProcFS().processes()
        mine = {process.pid for process in self.started} | self.orphans
        # Orphans of a holder that leads a session of its own.
        mine |= {process.pid for process in table.values() if process.session in mine}
        return sorted(mine | descendants(table, mine))

    def surveyor(self, options: SurveyOptions) -> Surveyor:
        # The holders are children of this test, and own children are never targets: here nobody looks.
        return Surveyor(options, nvml=self.nvml, pids=self.pids, self_pid=0)

    def params(self, **params: Any) -> dict[str, Any]:
        """Options of the module, complete."""
        return {
            "dev_dir": str(self.dev),
            "state_dir": str(self.folder / "state"),
            "run_dir": str(self.folder / "run"),
            "term_timeout": 10.0,
            "kill_timeout": 60.0,
            "users": [],
            "devices": [],
            "containers": [],
            "protect": [],
            **params,
        }

    def tear_down(self, check: bool = False, **params: Any) -> dict[str, Any]:
        return tear_down(self.params(**params), check, Seams(surveyor=self.surveyor, reader=QuietReader()))

    def close(self) -> None:
        for pid in self.orphans | set(self.pids()) - {process.pid for process in self.started}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@contextlib.contextmanager
def holders(folder: Path, gpus: int = 4) -> Iterator[Holders]:
    made = Holders(folder, gpus)
    try:
        yield made
    finally:
        made.close()


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for a fact, with a deadline."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


def pids_of(rows: Sequence[dict[str, Any]]) -> set[int]:
    return {row["pid"] for row in rows}


def reasons_of(rows: Sequence[dict[str, Any]]) -> dict[int, str]:
    return {row["pid"]: row["reason"] for row in rows}
