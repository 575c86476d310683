# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The crash of an earlier life, as separate processes: crash.py {server|worker|orphan|neighbour} PORT.

A server is started as a tree; its main process is then killed by the story. What stays:
- worker: titled like SGLang's scheduler, has GPUs 0-3 mapped and the others' nodes open;
- orphan: titled like SGLang's detokenizer, still listens on the server's port;
- neighbour: somebody else's training job on GPU 7, with all eight nodes open. It must live.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys


def hold(opened: range, mapped: list[int]) -> list[object]:
    """Open device nodes, map some of them; returns what must stay referenced."""
    dev = os.environ["STANDIN_DEV_DIR"]
    kept: list[object] = []
    for number in opened:
        node = os.open(os.path.join(dev, f"nvidia{number}"), os.O_RDWR)
        if number in mapped:
            kept.append(mmap.mmap(node, 4096))
        kept.append(node)
    return kept


def ready_and_wait() -> None:
    print("ready", flush=True)
    sys.stdout.close()
    signal.pause()


def worker() -> None:
    import setproctitle

    _kept = hold(range(8), [0, 1, 2, 3])
    setproctitle.setproctitle("sglang::scheduler_TP0")
    ready_and_wait()


def orphan(port: int) -> None:
    import setproctitle

    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen()
    setproctitle.setproctitle("sglang::detokenizer")
    ready_and_wait()


def neighbour() -> None:
    _kept = hold(range(8), [7])
    ready_and_wait()


def server(port: int) -> None:
    """Start the others of the tree, then wait to be killed."""
    for part in ("worker", "orphan"):
        child = subprocess.Popen([sys.executable, __file__, part, str(port)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        if child.stdout.readline().strip() != "ready":
            sys.exit(f"{part} did not start")
    ready_and_wait()


if __name__ == "__main__":
    part, port = sys.argv[1], int(sys.argv[2])
    {"worker": worker, "neighbour": neighbour}.get(part, lambda: None)()
    {"orphan": orphan, "server": server}.get(part, lambda _port: None)(port)
