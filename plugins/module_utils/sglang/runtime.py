# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""A launched instance seen through its record: its processes, its port, its log, its HTTP."""

from __future__ import annotations

import json
import typing as t

from ..common.clock import Clock
from ..common.errors import CleanslateError
from ..net.ports import PortState, look_at_ports
from ..proc.identity import Identity
from ..proc.table import Process, ProcFS, Vanished
from ..state.files import read_bytes
from ..state.instance import members
from ..state.record import InstanceRecord, RecordStore
from .http import Client, Question
from .logs import FileLog, JournalLog, LogSource
from .paths import Paths, paths
from .process_backend import exit_status
from .systemd_backend import Systemd


class Ending(t.NamedTuple):
    """How a server ended. C(code) None: nobody saw it."""

    code: int | None


class Runtime:
    """One recorded instance on this node."""

    def __init__(
        self,
        record: InstanceRecord,
        state_dir: str,
        fs: ProcFS | None = None,
        systemd: Systemd | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.record = record
        self.where: Paths = paths(state_dir, record.name)
        self.fs = fs or ProcFS()
        self.systemd = systemd or Systemd()
        self.clock = clock or Clock()
        self.boot_id = self.fs.boot_id()
        self.details = record.details

    def members(self, table: t.Iterable[Process] | None = None) -> list[Process]:
        found = self.fs.processes().values() if table is None else table
        return members(found, self.record, self.boot_id)

    @property
    def supervisor(self) -> int:
        return int(self.details.get("supervisor", 0))

    @property
    def main(self) -> Identity:
        """The main process, as recorded or as follow_restart() found it."""
        return Identity(self.record.pid, self.record.start_time)

    def follow_restart(self) -> bool:
        """With systemd, take the unit's present main process for the recorded one, which systemd may have replaced.
        Returns whether it did. In memory only: the record says what was launched."""
        if self.record.backend != "systemd" or self.main_alive():
            return False
        shown = self.systemd.show(self.record.unit, "MainPID", "InvocationID")
        pid = int(shown.get("MainPID", "0") or 0)
        if not pid:
            return False
        try:
            process = self.fs.process(pid)
        except Vanished:
            return False
        self.record.pid, self.record.start_time, self.record.pgrp = pid, process.start_time, process.pgrp
        self.record.boot_id = self.boot_id
        self.details["invocation"] = shown.get("InvocationID", "")
        return True

    def main_alive(self) -> bool:
        if self.record.boot_id and self.boot_id and self.record.boot_id != self.boot_id:
            return False
        try:
            process = self.fs.process(self.record.pid)
        except Vanished:
            return False
        return process.start_time == self.record.start_time and not process.zombie

    def port(self, pids: t.Iterable[int]) -> PortState:
        return look_at_ports(self.fs, [self.record.port], pids)[0]

    def listens(self, own: t.Sequence[Process]) -> bool:
        """Whether this instance's own process listens on its port."""
        pids = {process.pid for process in own}
        return any(pids.intersection(listener.pids) for listener in self.port(pids).listeners)

    def log(self) -> LogSource:
        if self.record.backend == "systemd":
            return JournalLog(self.record.unit, str(self.details.get("invocation", "")), self.systemd)
        return FileLog(self.where.log)

    def ending(self) -> Ending:
        """How the main process ended, as its parent saw it."""
        if self.record.backend == "systemd":
            shown = self.systemd.show(self.record.unit, "ExecMainCode", "ExecMainStatus")
            status = shown.get("ExecMainStatus", "")
            # systemd forgets a unit that ended well (a TERM is well for it), and shows code 0.
            if not status.isdigit() or shown.get("ExecMainCode") == "0":
                return Ending(None)
            # ExecMainCode: CLD_EXITED 1, CLD_KILLED 2, CLD_DUMPED 3
            return Ending(int(status) if shown.get("ExecMainCode") == "1" else -int(status))
        left = exit_status(self.where, self.record.pid)
        return Ending(int(left["code"]) if left else None)

    def keys(self) -> dict[str, str]:
        """The keys that the launch wrote for SGLang, by argument name without dashes."""
        raw = read_bytes(self.where.config)
        if raw is None:
            return {}
        try:
            data = json.loads(raw.decode("utf-8"))
        except ValueError:
            raise CleanslateError("%s is damaged; launch the instance again." % self.where.config) from None
        return {str(key): str(value) for key, value in data.items()}

    def client(self) -> Client:
        """With the key that generations and /server_info need: the admin key opens neither where both are set."""
        keys = self.keys()
        return Client(
            self.record.host,
            self.record.port,
            keys.get("api-key") or keys.get("admin-api-key"),
            bool(self.details.get("tls")),
            self.clock,
        )

    def question(self) -> Question:
        return Question.of(bool(self.details.get("skips_tokenizer")), bool(self.details.get("embeds")))

    @property
    def schedulers(self) -> int:
        return int(self.details.get("schedulers", 1))


def load(name: str, state_dir: str) -> InstanceRecord:
    """The record of an instance that must have been launched. Raises CleanslateError when there is none."""
    record = RecordStore(state_dir).load(name)
    if record is None:
        raise CleanslateError(
            "instance: %s was not launched on this node (no record below %s). Run server_launch first."
            % (name, RecordStore(state_dir).folder)
        )
    return record
