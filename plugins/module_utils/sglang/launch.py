# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Starting what was declared: every file, the record and the server, in one go, or nothing."""

from __future__ import annotations

import contextlib
import os
import secrets as random
import stat
import time
import typing as t

from ..common.errors import CleanslateError
from ..common.text import HIDDEN, is_secret_name
from ..gpu.rows import describe
from ..gpu.survey import Survey
from ..net.ports import look_at_ports
from ..proc.table import ProcFS, Vanished
from ..state.files import make_dir, read_bytes, remove, write_atomic
from ..state.instance import members
from ..state.record import InstanceRecord, RecordStore
from . import command as commands
from . import process_backend, systemd_backend
from .declaration import Declaration
from .prepare import Complete, Prepared
from .runtime import Runtime
from .systemd_backend import Systemd

#: What a record's C(details) keep that other modules read.
#: declared: flat state (command.declared_state); arguments: typed, without secrets; salt; schedulers; supervisor;
#: skips_tokenizer, embeds, tls; launched_boottime; stall_timeout, ready_timeout; invocation (systemd); workers;
#: account: the server's own account of these arguments, once proven;
#: declaration and last_ready: this launch's, and that of the last launch that became ready, without secrets.


class Launched(t.NamedTuple):
    changed: bool
    record: InstanceRecord
    #: Before and after for people, secrets hidden.
    diff: list[dict[str, str]]
    written: list[str]


def salt_of(record: InstanceRecord | None) -> str:
    """The key of fingerprints: the record's own, so that they stay comparable, or a new one."""
    return str(record.details.get("salt", "")) if record and record.details.get("salt") else random.token_hex(16)


def last_ready(state_dir: str, declaration: Declaration) -> Declaration | None:
    """The last declaration that became ready, with the secrets of C(declaration); None when there was none."""
    record = RecordStore(state_dir).load(declaration.name)
    public = record.details.get("last_ready") if record else None
    return declaration.with_public(public) if isinstance(public, dict) else None


def readable(state: t.Mapping[str, str]) -> str:
    """A declared state as lines for a diff."""
    return "".join(
        "%s = %s\n" % (key, HIDDEN if value.startswith("hidden:") else value) for key, value in sorted(state.items())
    )


def still_running(record: InstanceRecord | None, state: t.Mapping[str, str], runtime: Runtime | None) -> bool:
    """Whether exactly this declaration runs already."""
    return bool(record and runtime and record.details.get("declared") == dict(state) and runtime.main_alive())


def launch(
    prepared: Prepared,
    survey: Survey,
    state_dir: str,
    check_mode: bool = False,
    fs: ProcFS | None = None,
    systemd: Systemd | None = None,
    unit_dir: str = systemd_backend.UNIT_DIR,
) -> Launched:
    """Write and start. In check mode only say what would be.

    Raises CleanslateError when the declaration is wrong, or its GPUs or ports are not free (in check mode the teardown
    that would free them has not happened, so that is not looked at).
    """
    fs = fs or ProcFS()
    systemd = systemd or Systemd()
    complete = prepared.require()
    declaration, where = complete.declaration, complete.where
    store = RecordStore(state_dir)
    before = store.load(declaration.name)
    salt = salt_of(before)
    state = complete.state(salt)
    files = _files(complete, unit_dir)
    diff = _diff(complete, before, state, files)
    if before is not None and still_running(before, state, Runtime(before, state_dir, fs, systemd)):
        return Launched(False, before, [], [])
    if not check_mode:
        _require_room(complete, survey, before, fs)
    record = InstanceRecord(
        name=declaration.name,
        backend=declaration.backend,
        unit=systemd_backend.unit_name(declaration.name) if declaration.backend == "systemd" else "",
        boot_id=fs.boot_id(),
        gpus=complete.uuids,
        host=declaration.host,
        port=declaration.port,
        ports=complete.ports,
        argv_digest=commands.digest(state, environment=False),
        environment_digest=commands.digest(state, environment=True),
        sglang_version=complete.identity.version,
        launched_at=time.time(),
        simulated=survey.simulated,
        details={
            "declared": state,
            "arguments": commands.arguments(declaration),
            "salt": salt,
            "schedulers": declaration.schedulers,
            "skips_tokenizer": declaration.skips_tokenizer,
            "embeds": declaration.embeds,
            "tls": bool(declaration.args.get("ssl_certfile")),
            "stall_timeout": declaration.stall_timeout,
            "ready_timeout": declaration.ready_timeout,
            "launched_boottime": time.clock_gettime(time.CLOCK_BOOTTIME),
            "declaration": declaration.public(),
            "last_ready": before.details.get("last_ready") if before else None,
        },
    )
    if check_mode:
        return Launched(True, record, diff, sorted(path for path, _content, _mode in files))
    _make_folder(complete)
    # The record comes first: whatever happens from here on, the next run knows that this instance may be there.
    store.save(record)
    written = [path for path, content, mode in files if _write(complete, path, content, mode)]
    if not complete.command.config:
        remove(where.config)
    if declaration.backend == "systemd":
        _start_unit(record, systemd, reload=any(path.startswith(unit_dir) for path in written), fs=fs)
    else:
        cgroup = "" if survey.simulated else process_backend.own_cgroup(declaration.name)
        started = process_backend.start(
            declaration.name, complete.command.argv, complete.environment, where, complete.account, cgroup, fs
        )
        record.pid, record.start_time, record.pgrp = started.pid, started.start_time, started.pgrp
        record.cgroup = started.cgroup
        record.details["supervisor"] = started.supervisor
    store.save(record)
    return Launched(True, record, diff, written)


def _files(complete: Complete, unit_dir: str) -> list[tuple[str, str, int]]:
    """Path, content and mode of everything that is written."""
    where, declaration = complete.where, complete.declaration
    out: list[tuple[str, str, int]] = []
    if complete.command.config:
        out.append((where.config, complete.command.config_text(), 0o600))
    if declaration.backend == "systemd":
        out.append((where.environment, systemd_backend.environment_file(complete.environment), 0o640))
        unit = systemd_backend.unit_text(
            declaration.name, complete.command.argv, where, complete.account, declaration.stop_timeout
        )
        out.append((systemd_backend.unit_path(declaration.name, unit_dir), unit, 0o644))
    return out


def _diff(
    complete: Complete, before: InstanceRecord | None, state: t.Mapping[str, str], files: list[tuple[str, str, int]]
) -> list[dict[str, str]]:
    old = before.details.get("declared", {}) if before else {}
    name = complete.declaration.name
    out = [
        {
            "before_header": "%s as launched" % name if old else "%s (not launched)" % name,
            "after_header": "%s as declared" % name,
            "before": readable(old) if isinstance(old, dict) else "",
            "after": readable(state),
        }
    ]
    for path, content, _mode in files:
        if path.endswith(".service"):
            raw = read_bytes(path)
            out.append(
                {
                    "before_header": path,
                    "after_header": path,
                    "before": raw.decode("utf-8", "replace") if raw else "",
                    "after": content,
                }
            )
    return out


def _require_room(complete: Complete, survey: Survey, before: InstanceRecord | None, fs: ProcFS) -> None:
    """The GPUs and ports must be free now, whatever the plan found earlier."""
    name = complete.declaration.name
    own = {process.pid for process in members(survey.table.values(), before, fs.boot_id())} if before else set()
    wrong: list[str] = []
    if own:
        wrong.append(
            "Instance %s still runs (pid %s). Tear it down first."
            % (name, ", ".join(str(pid) for pid in sorted(own)[:8]))
        )
    for gpu in complete.gpus:
        for holding in survey.of_gpu(gpu):
            if holding.counts and holding.process.pid not in own:
                wrong.append("%s is held by %s." % (gpu.label, describe(holding.process)))
    for port in look_at_ports(fs, complete.ports, survey.table):
        for listener in port.listeners:
            if not own.intersection(listener.pids):
                pids = ", ".join(str(pid) for pid in listener.pids) or "a process out of sight"
                wrong.append("Port %d is taken by %s (%s)." % (port.port, pids, listener.address))
    if wrong:
        raise CleanslateError("\n".join(dict.fromkeys(wrong)), blocked=list(dict.fromkeys(wrong)))


def _make_folder(complete: Complete) -> None:
    """The folder stays this user's own also when the server runs under another account, which may pass through and read
    its own files there, but plant none that this user would write into."""
    make_dir(os.path.dirname(complete.where.folder), 0o755)
    make_dir(complete.where.folder, 0o700)
    take_back(complete.where.folder)
    mode = 0o711 if complete.account.other else 0o700
    if os.stat(complete.where.folder).st_mode & 0o777 != mode:
        os.chmod(complete.where.folder, mode)


def take_back(folder: str) -> None:
    """Own a folder that belongs to another account, as launches of an earlier version left it, and what lies there.
    Links and the like, which that account may have planted, go."""
    own = os.geteuid(), os.getegid()
    if os.stat(folder).st_uid == own[0]:
        return
    os.chown(folder, *own)
    for entry in os.scandir(folder):
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
            os.chown(entry.path, *own, follow_symlinks=False)
        elif not stat.S_ISDIR(status.st_mode):
            os.unlink(entry.path)


def _write(complete: Complete, path: str, content: str, mode: int) -> bool:
    if path == complete.where.config and complete.account.other:
        return write_atomic(path, content.encode("utf-8"), mode, complete.account.uid, complete.account.gid)
    return write_atomic(path, content.encode("utf-8"), mode)


def _start_unit(record: InstanceRecord, systemd: Systemd, reload: bool, fs: ProcFS) -> None:
    if reload:
        systemd.reload()
    if systemd.show(record.unit, "ActiveState").get("ActiveState") == "failed":
        systemd.reset_failed(record.unit)
    systemd.start(record.unit)
    shown = systemd.show(record.unit, "MainPID", "ControlGroup", "InvocationID")
    record.details["invocation"] = shown.get("InvocationID", "")
    record.cgroup = shown.get("ControlGroup", "").rstrip("/")
    pid = int(shown.get("MainPID", "0") or 0)
    record.pid = pid
    if pid:
        # One that has ended already is server_ready's matter.
        with contextlib.suppress(Vanished):
            found = fs.process(pid)
            record.start_time, record.pgrp = found.start_time, found.pgrp


def shown_nccl(prepared: Prepared) -> dict[str, dict[str, str]]:
    """The effective NCCL set, with the variable that decided each."""
    return {
        name: {"value": HIDDEN if is_secret_name(name) else value, "from": prepared.nccl.sources[name]}
        for name, value in sorted(prepared.nccl.values.items())
    }
