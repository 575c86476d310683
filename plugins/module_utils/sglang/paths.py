# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Where the files of one instance lie, below C(STATE_DIR/servers/NAME)."""

from __future__ import annotations

import os
import typing as t


class Paths(t.NamedTuple):
    """Paths of one instance; nothing here creates any."""

    folder: str
    #: Keys for SGLang, 0600, only when there are any.
    config: str
    #: Variables for systemd, 0640.
    environment: str
    #: The server's output (back end C(process)), 0600: SGLang itself writes keys there.
    log: str
    #: How the last server ended (back end C(process)).
    exit_file: str
    supervisor: str


def paths(state_dir: str, name: str) -> Paths:
    folder = os.path.join(state_dir, "servers", name)
    return Paths(
        folder=folder,
        config=os.path.join(folder, "config.yaml"),
        environment=os.path.join(folder, "environment"),
        log=os.path.join(folder, "server.log"),
        exit_file=os.path.join(folder, "exit.json"),
        supervisor=os.path.join(state_dir, "lib", "cleanslate_supervise.py"),
    )


def cache_dir(state_dir: str) -> str:
    """Answers of SGLang's resolver."""
    return os.path.join(state_dir, "cache")
