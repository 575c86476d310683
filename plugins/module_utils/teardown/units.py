# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""systemd's units: which process is a unit's main one, does it come back by itself, stop it.

A unit is stopped through its manager before its processes are signalled, so that C(Restart=) does not revive them.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import typing as t

from ..common.errors import CleanslateError
from ..common.text import show

_NAME = re.compile(r"[A-Za-z0-9:_.\\@][A-Za-z0-9:_.\\@-]{0,250}")
# What holds whole sessions, users or machines together.
_NEVER = re.compile(r"session-.*\.scope|user@.*\.service|init\.scope|.*\.slice|systemd-.*\.service|dbus.*\.service")
_KINDS = ("service", "scope", "socket", "target", "timer", "path", "mount", "slice", "device", "swap", "automount")
#: Kinds that run something or start what does; a target is one that carries no more than the server's own units.
_STOPPABLE = ("service", "scope", "socket", "timer", "path", "target")
_SYSTEM_TARGETS = re.compile(
    r"(?:basic|sysinit|default|multi-user|graphical|rescue|emergency|shutdown|umount|final|exit|halt|poweroff|reboot"
    r"|kexec|suspend|hibernate|sleep|sockets|timers|paths|slices|swap|getty.*|network.*|nss-.*|time-.*|initrd.*"
    r"|local-fs.*|remote-fs.*|cryptsetup.*|systemd-.*)\.target"
)
_PROPERTIES = ("Id", "LoadState", "ActiveState", "SubState", "MainPID", "ControlGroup", "Restart")


class UnitKey(t.NamedTuple):
    """A unit and whose manager runs it: the system's (C(manager) None) or that of the user with this uid, on this
    machine or in the LXC container of this id."""

    name: str
    manager: int | None = None
    container: str = ""

    @property
    def stop_command(self) -> list[str]:
        return [*_systemctl(self.manager, self.container), "stop", "--", self.name]

    def __str__(self) -> str:
        text = self.name if self.manager is None else "%s of user %d" % (self.name, self.manager)
        return "%s in container %s" % (text, self.container) if self.container else text


@dataclasses.dataclass(frozen=True)
class UnitState:
    key: UnitKey
    load: str = ""
    active: str = ""
    sub: str = ""
    main_pid: int = 0
    cgroup: str = ""
    restart: str = "no"

    @property
    def live(self) -> bool:
        """Whether there is something to stop; a unit that waits for its next restart is live."""
        return self.active in ("active", "activating", "reloading", "deactivating", "refreshing")

    @property
    def known(self) -> bool:
        return self.load not in ("", "not-found")

    @property
    def restarts(self) -> bool:
        return self.restart not in ("", "no")


def check_unit(name: str) -> str:
    """The full name of a unit that may be stopped. Raises CleanslateError naming option units otherwise."""
    if not name or name.startswith((".", "-")):
        name = "?"
    full = name if name.rpartition(".")[2] in _KINDS else name + ".service"
    if _NAME.fullmatch(full) is None:
        raise CleanslateError(
            "units: %r is no name of a unit. Write for example sglang-main.service." % show(name), option="units"
        )
    if full.rpartition(".")[2] not in _STOPPABLE:
        raise CleanslateError(
            "units: %s runs no processes. Name the service (or scope, socket, timer, path, target) of the server."
            % show(full),
            option="units",
        )
    if _NEVER.fullmatch(full) or _SYSTEM_TARGETS.fullmatch(full):
        raise CleanslateError(
            "units: %s holds a session, a user or the system together and is never stopped. Name the server's own unit."
            % show(full),
            option="units",
        )
    return full


def may_stop(name: str) -> bool:
    """Whether a unit that was found, not named, may be stopped: a service, and none that carries others."""
    return name.endswith(".service") and _NEVER.fullmatch(name) is None and _NAME.fullmatch(name) is not None


def _systemctl(manager: int | None, container: str = "") -> list[str]:
    """systemctl for one manager; in a container through the container, as its own root."""
    command = ["systemctl", "--no-ask-password"]
    if container:
        command = [*enter(container), *command]
    if manager is None:
        return command
    if manager == os.geteuid() and not container:
        return [*command, "--user"]
    return [*command, "--user", "--machine=%d@.host" % manager]


def enter(container: str) -> list[str]:
    """The words before a command that runs in an LXC container, as its own root."""
    # Proxmox keeps a container's lock while it works in it; plain LXC has no pct.
    words = ["pct", "exec"] if container.isdigit() and shutil.which("pct") else ["lxc-attach", "-n"]
    return [*words, container, "--"]


def _environment(container: str = "") -> dict[str, str]:
    # pct hands the caller's variables on, and a session of this machine means nothing in a container.
    names = ("PATH",) if container else ("PATH", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")
    keep = {name: os.environ[name] for name in names if name in os.environ}
    keep.setdefault("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
    if os.geteuid() and not container:
        keep.setdefault("XDG_RUNTIME_DIR", "/run/user/%d" % os.geteuid())
    return dict(keep, LC_ALL="C", SYSTEMD_PAGER="", SYSTEMD_COLORS="0")


def parse_show(text: str) -> list[dict[str, str]]:
    """The output of C(systemctl show) for several units: blocks of C(Key=value) between empty lines."""
    blocks: list[dict[str, str]] = [{}]
    for line in text.split("\n"):
        key, equals, value = line.partition("=")
        if equals and re.fullmatch(r"[A-Za-z]+", key):
            blocks[-1][key] = value
        elif not line and blocks[-1]:
            blocks.append({})
    return [block for block in blocks if block]


class StopJob:
    """A running C(systemctl stop)."""

    def __init__(self, key: UnitKey, process: subprocess.Popen[bytes]) -> None:
        self.key = key
        self._process = process

    @property
    def done(self) -> bool:
        return self._process.poll() is not None

    @property
    def failed(self) -> bool:
        return self._process.poll() not in (None, 0)

    def error(self) -> str:
        """What systemctl said when it failed."""
        if self._process.stderr is None:
            return ""
        return show(self._process.stderr.read(2000).decode("utf-8", "surrogateescape").strip())

    def give_up(self) -> None:
        """Stop waiting: end the client. The manager goes on with its job."""
        if not self.done:
            self._process.kill()
        self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()


class Systemd:
    """systemctl, called without a shell: the seam that tests replace."""

    #: Seconds that a question may take.
    patience = 10.0

    def __init__(self, booted: str = "/run/systemd/system") -> None:
        self._booted = booted

    @property
    def present(self) -> bool:
        """Whether systemd runs this machine (sd_booted(3))."""
        return os.path.isdir(self._booted)

    def show(self, keys: t.Iterable[UnitKey]) -> dict[UnitKey, UnitState]:
        """The state of these units. A manager that does not answer knows none."""
        out: dict[UnitKey, UnitState] = {}
        by_manager: dict[tuple[int | None, str], list[UnitKey]] = {}
        for key in dict.fromkeys(keys):
            by_manager.setdefault((key.manager, key.container), []).append(key)
        for (manager, container), wanted in by_manager.items():
            if not container and not self.present:
                continue
            command = [*_systemctl(manager, container), "show", "--property=" + ",".join(_PROPERTIES), "--"]
            try:
                done = subprocess.run(  # pylint: disable=ansible-bad-function
                    [*command, *(key.name for key in wanted)],
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=self.patience,
                    env=_environment(container),
                    check=False,
                )
            except (OSError, subprocess.TimeoutExpired):
                continue
            blocks = parse_show(done.stdout.decode("utf-8", "surrogateescape"))
            # One block for each name, in the order asked for (an alias answers with its real Id).
            for key, block in zip(wanted, blocks) if len(blocks) == len(wanted) else ():
                pid = block.get("MainPID", "0")
                out[key] = UnitState(
                    key,
                    block.get("LoadState", ""),
                    block.get("ActiveState", ""),
                    block.get("SubState", ""),
                    int(pid) if pid.isdigit() else 0,
                    block.get("ControlGroup", ""),
                    block.get("Restart", "no"),
                )
        return out

    def stop(self, key: UnitKey) -> StopJob | None:
        """Begin to stop a unit; None when there is no systemctl."""
        try:
            process = subprocess.Popen(  # pylint: disable=ansible-bad-function
                key.stop_command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=_environment(key.container),
            )
        except OSError:
            return None
        return StopJob(key, process)
