# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""What is known of a launched instance: one JSON file each, C(STATE_DIR/instances/NAME.json), mode 0600.

No secret is ever part of it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import typing as t

from ..common.errors import CleanslateError
from ..common.text import show
from .files import check_dir, ensure_dir, read_bytes, remove, write_atomic

FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


def check_name(name: str, option: str = "instance") -> str:
    """Return C(name) if it can name an instance, a unit and a file. Raises CleanslateError naming C(option)
    otherwise."""
    if _NAME.fullmatch(name) is None:
        raise CleanslateError(
            "%s: %r is no name. Use letters, digits, '.', '_' and '-', at most 63, the first a letter or digit."
            % (option, show(name)),
            option=option,
        )
    return name


@dataclasses.dataclass
class InstanceRecord:
    """One declared server on this node, as it was launched."""

    name: str
    #: How it was started: C(systemd) or C(process).
    backend: str
    #: Unit name with suffix, empty for C(process).
    unit: str = ""
    #: Main process when it was launched: pid, start time in clock ticks since boot, process group.
    pid: int = 0
    start_time: int = 0
    pgrp: int = 0
    #: Kernel boot in which the numbers above mean something.
    boot_id: str = ""
    #: The instance's own cgroup; empty when it has none of its own.
    cgroup: str = ""
    #: GPUs by UUID.
    gpus: list[str] = dataclasses.field(default_factory=list)
    host: str = "127.0.0.1"
    port: int = 0
    #: Every fixed port that it listens on, the HTTP port first.
    ports: list[int] = dataclasses.field(default_factory=list)
    argv_digest: str = ""
    environment_digest: str = ""
    sglang_version: str = ""
    #: Seconds since the epoch; 0 until it happened.
    launched_at: float = 0.0
    ready_at: float = 0.0
    simulated: bool = False
    #: The launcher's own matters: paths of files, the declaration without secrets.
    details: dict[str, t.Any] = dataclasses.field(default_factory=dict)


# Exact types: a bool is an int to isinstance.
# pylint: disable=unidiomatic-typecheck
_KINDS: dict[str, t.Callable[[t.Any], bool]] = {
    "str": lambda value: type(value) is str,
    "int": lambda value: type(value) is int,
    "bool": lambda value: type(value) is bool,
    "float": lambda value: type(value) in (int, float),
    "list[str]": lambda value: type(value) is list and all(type(item) is str for item in value),
    "list[int]": lambda value: type(value) is list and all(type(item) is int for item in value),
    "dict[str, t.Any]": lambda value: type(value) is dict,
}
# pylint: enable=unidiomatic-typecheck


def _is_sound(record: InstanceRecord) -> bool:
    """Whether each value is of its kind, so that a damaged record is found when it is read and not when it is used."""
    return all(_KINDS[str(field.type)](getattr(record, field.name)) for field in dataclasses.fields(record))


class RecordStore:
    """All records of this node. Every method raises CleanslateError when the folder is not to be trusted or read."""

    def __init__(self, state_dir: str = "/var/lib/cleanslate") -> None:
        self.state_dir = state_dir
        self.folder = os.path.join(state_dir, "instances")

    def path(self, name: str) -> str:
        return os.path.join(self.folder, check_name(name) + ".json")

    def _check(self) -> bool:
        return check_dir(self.state_dir, "state_dir") and check_dir(self.folder, "state_dir")

    def names(self) -> list[str]:
        if not self._check():
            return []
        try:
            found = os.listdir(self.folder)
        except OSError as error:
            raise CleanslateError(
                "state_dir: %s cannot be read: %s. Run the play with become: true, or set state_dir."
                % (show(self.folder), os.strerror(error.errno or 0))
            ) from None
        return sorted(entry[:-5] for entry in found if entry.endswith(".json") and _NAME.fullmatch(entry[:-5]))

    def load(self, name: str) -> InstanceRecord | None:
        """The record, None when there is none. Raises CleanslateError when it cannot be understood."""
        path = self.path(name)
        raw = read_bytes(path, trusted=True) if self._check() else None
        if raw is None:
            return None
        mend = "Look at it, and remove it if the instance is gone; nothing was changed."
        try:
            data = json.loads(raw.decode("utf-8"))
            if data.pop("format") != FORMAT:
                raise CleanslateError("%s was written by another version of this collection. %s" % (path, mend))
            record = InstanceRecord(**data)
            if record.name != name or not _is_sound(record):
                raise ValueError(name)
            return record
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CleanslateError("%s is damaged. %s" % (path, mend)) from None

    def all(self) -> list[InstanceRecord]:
        """Every record. One that cannot be understood is an error: whose processes are whose is then unknown."""
        return [record for record in map(self.load, self.names()) if record is not None]

    def save(self, record: InstanceRecord) -> bool:
        """Write the record; returns whether it changed."""
        path = self.path(record.name)
        ensure_dir(self.state_dir, "state_dir")
        ensure_dir(self.folder, "state_dir", 0o700)
        data = dict(dataclasses.asdict(record), format=FORMAT)
        content = json.dumps(data, indent=1, sort_keys=True, ensure_ascii=True).encode("ascii") + b"\n"
        return write_atomic(path, content, 0o600)

    def forget(self, name: str) -> bool:
        """Remove the record; returns whether there was one."""
        path = self.path(name)
        return self._check() and remove(path)
