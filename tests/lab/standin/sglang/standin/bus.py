# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Datagrams over the three unix sockets that the server leaves in its temporary folder (SGLang: ZeroMQ over ipc://)."""

from __future__ import annotations

import json
import os
import socket


def short(path):
    """A name for the same file that fits into a socket address (107 bytes), and the descriptor it needs."""
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    return f"/proc/self/fd/{folder}/{os.path.basename(path)}", folder


class Inbox:
    """The receiving end: replaces the empty file of that name by a socket."""

    def __init__(self, path):
        os.unlink(path)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        name, folder = short(path)
        try:
            self.socket.bind(name)
        finally:
            os.close(folder)

    def take(self, timeout=None):
        """The next message, or None when none came in `timeout` seconds (None: wait for ever; 0: do not wait)."""
        self.socket.settimeout(timeout)
        try:
            return json.loads(self.socket.recv(1 << 18))
        except (BlockingIOError, TimeoutError, socket.timeout):
            return None


class Outbox:
    """The sending end. A message to a receiver that is gone or does not read is lost."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.setblocking(False)
        self.name, self.folder = short(path)

    def put(self, **message):
        try:
            self.socket.sendto(json.dumps(message).encode(), self.name)
        except (BlockingIOError, FileNotFoundError, ConnectionRefusedError):
            return False
        return True
