# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Back end C(systemd): the unit and its environment file, quoted so that every byte arrives as declared.

Rules (systemd.service(5) "Command lines", systemd.exec(5) C(EnvironmentFile=), src/basic/env-file.c, extract-word.c):
in C(ExecStart=) a double-quoted word knows backslash escapes, C(%) begins a specifier and C($) a variable; in an
environment file a double-quoted value unescapes only backslash, double quote, dollar and backtick, and expands nothing.
"""

from __future__ import annotations

import os
import subprocess
import typing as t

from ..common.errors import CleanslateError
from ..common.text import show
from .account import Account
from .paths import Paths

UNIT_DIR = "/etc/systemd/system"
#: Starts within the limit's window before systemd gives up; the window is longer than a start takes.
START_LIMIT_BURST = 3
COMMAND_TIMEOUT = 60.0

_SYSTEMCTL = ("systemctl", "--no-pager", "--no-ask-password")


def unit_name(instance: str) -> str:
    return "cleanslate-%s.service" % instance


def unit_path(instance: str, unit_dir: str = UNIT_DIR) -> str:
    return os.path.join(unit_dir, unit_name(instance))


def quote_word(word: str) -> str:
    """One word of C(ExecStart=). Raises CleanslateError for bytes that a unit cannot hold."""
    out: list[str] = []
    for char in word:
        if char in '\\"':
            out.append("\\" + char)
        elif char in "%$":
            out.append(char + char)
        elif char == "\n":
            out.append("\\n")
        elif char == "\t":
            out.append("\\t")
        elif ord(char) < 0x20 or ord(char) == 0x7F:
            out.append("\\x%02x" % ord(char))
        else:
            out.append(char)
    return '"%s"' % "".join(_sayable("".join(out)))


def quote_value(value: str) -> str:
    """One value of an environment file. Raises CleanslateError for what a line cannot hold."""
    if set(value) & {"\n", "\r", "\0"}:
        raise CleanslateError("%r cannot be put into an environment file: it has more than one line." % show(value))
    return '"%s"' % _sayable("".join("\\" + char if char in '\\"$`' else char for char in value))


def _sayable(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise CleanslateError("%s is no valid UTF-8, and systemd takes no other." % show(text)) from None
    if "\0" in text:
        raise CleanslateError("%s holds a zero byte." % show(text))
    return text


def environment_file(environment: t.Mapping[str, str]) -> str:
    return "".join("%s=%s\n" % (name, quote_value(environment[name])) for name in sorted(environment))


def unit_text(instance: str, argv: t.Sequence[str], where: Paths, account: Account, stop_timeout: float) -> str:
    """The whole unit."""
    # A single % in a path would begin a specifier; settings outside ExecStart= know no quoting.
    escaped = {name: value.replace("%", "%%") for name, value in (("env", where.environment), ("home", account.home))}
    lines = [
        "# Written by the cleanslate.inference collection; changes are lost at the next launch.",
        "[Unit]",
        "Description=SGLang server %s" % instance.replace("%", "%%"),
        "After=network-online.target",
        "Wants=network-online.target",
        "StartLimitIntervalSec=1h",
        "StartLimitBurst=%d" % START_LIMIT_BURST,
        "",
        "[Service]",
        "Type=exec",
        "User=%s" % account.name.replace("%", "%%"),
        "WorkingDirectory=-%s" % escaped["home"],
        "EnvironmentFile=%s" % escaped["env"],
        "ExecStart=%s" % " ".join(quote_word(word) for word in argv),
        "Restart=on-failure",
        "RestartSec=5",
        # TERM reaches the main process alone, which drains; what is left at the limit is killed with the cgroup.
        "KillMode=mixed",
        "TimeoutStopSec=%d" % max(1, round(stop_timeout)),
        "SendSIGKILL=yes",
        "SuccessExitStatus=143",
        "PrivateTmp=yes",
        "UMask=0077",
        "LimitNOFILE=1048576",
        "LimitMEMLOCK=infinity",
        "TasksMax=infinity",
        "StandardOutput=journal",
        "StandardError=journal",
        "SyslogIdentifier=cleanslate-%s" % instance.replace("%", "%%"),
        "",
    ]
    return "\n".join(lines)


class Systemd:
    """The calls of systemctl and journalctl: the one seam that tests replace."""

    def run(self, *words: str, timeout: float = COMMAND_TIMEOUT) -> str:
        """Output of one command. Raises CleanslateError with what it said when it fails."""
        try:
            done = subprocess.run(  # pylint: disable=ansible-bad-function
                words,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout,
                check=False,
            )
        except FileNotFoundError:
            raise CleanslateError(
                "%s is not there: this node has no systemd. Set sglang_server_backend: process." % words[0]
            ) from None
        except subprocess.TimeoutExpired:
            raise CleanslateError("%s did not answer within %.0f s." % (" ".join(words), timeout)) from None
        if done.returncode != 0:
            said = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
            raise CleanslateError(
                "%s failed (exit %d): %s"
                % (" ".join(words), done.returncode, show(said[0]) if said else "it said nothing")
            )
        return done.stdout.decode("utf-8", "surrogateescape")

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        """Properties of one unit."""
        out = self.run(*_SYSTEMCTL, "show", "--property=" + ",".join(properties), "--", unit)
        return {key: value for key, sep, value in (line.partition("=") for line in out.splitlines()) if sep}

    def reload(self) -> None:
        self.run(*_SYSTEMCTL, "daemon-reload")

    def reset_failed(self, unit: str) -> None:
        """Forget failed starts, and with them the start limit."""
        self.run(*_SYSTEMCTL, "reset-failed", "--", unit)

    def start(self, unit: str) -> None:
        """Returns once the program runs (C(Type=exec)), not once it is ready."""
        self.run(*_SYSTEMCTL, "start", "--", unit)
