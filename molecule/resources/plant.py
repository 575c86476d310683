#!/usr/bin/env python3
# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Processes for roles to meet: plant.py '[{"name": …}, …]' starts them as orphans, and returns once all are ready.

Tests know them by PLANT in their environment, which is the entry. What an entry may say, beside its name:
  title        what the process calls itself (otherwise its command line tells: python3 plant.py NAME)
  script       run under this path instead of plant.py
  hold         paths that it opens and keeps open: device nodes, files
  listen       TCP port of loopback that it listens on
  environment  variables on top of the caller's, to be seen in /proc/PID/environ
  ignore_term  SIGTERM does nothing
  stopped      it stops itself (SIGSTOP) once it is ready
  zombie       it has a dead child that it does not wait for
  children     entries that it starts, in its own process group
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys


def start(entry: dict, session: bool) -> None:
    """Start a process and wait until it is ready."""
    script = entry.get("script", os.path.abspath(__file__))
    if not os.path.exists(script):
        os.makedirs(os.path.dirname(script), exist_ok=True)
        os.symlink(os.path.abspath(__file__), script)
    # Titles must not run over the environment, which SPT_NOENV prevents.
    environment = {**os.environ, "SPT_NOENV": "1", **entry.get("environment", {}), "PLANT": json.dumps(entry)}
    process = subprocess.Popen(
        [sys.executable, script, entry["name"]],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=session,
        cwd="/",
    )
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        sys.exit(f"{entry['name']} did not start")


def be(entry: dict) -> None:
    """Be one of the processes."""
    kept: list[object] = [os.open(path, os.O_RDWR | os.O_NONBLOCK) for path in entry.get("hold", ())]
    if "listen" in entry:
        listener = socket.create_server(("127.0.0.1", entry["listen"]))
        kept.append(listener)
    if entry.get("ignore_term"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if entry.get("zombie") and os.fork() == 0:
        os._exit(0)
    for child in entry.get("children", ()):
        start(child, session=False)
    if "title" in entry:
        import setproctitle

        setproctitle.setproctitle(entry["title"])
    os.write(1, b"ready\n")
    os.dup2(0, 1)
    os.dup2(0, 2)
    if entry.get("stopped"):
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        signal.pause()


if __name__ == "__main__":
    if "PLANT" in os.environ:
        be(json.loads(os.environ["PLANT"]))
    for wanted in json.loads(sys.argv[1]):
        start(wanted, session=True)
