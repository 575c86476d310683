# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the server leaves behind: names, sizes and lifetimes as seen on H200.

- five files tmpXXXXXXXX in the temporary folder, three of them sockets later; never removed;
- sglang_loads_<instance>_<hash>.shm, 16396 bytes, one a server: open, mapped and locked while it lives; never removed;
- sgl_shm_mq_<pid>_<random>, 25165836 bytes, with tensor parallelism: by rank 0; never removed;
- sem.loky-<pid>-<random>, 32 bytes, one a scheduler: removed at a graceful end only;
- with --enable-metrics a folder tmpXXXXXXXX with Prometheus' files; with EAGLE torchinductor_<user>.
"""

from __future__ import annotations

import fcntl
import getpass
import hashlib
import json
import mmap
import os
import struct
import tempfile
import uuid

from sglang.standin import settings

HEADER = struct.Struct("<4sHHI")
SLOT = 16 * 1024
LOADS_SIZE = HEADER.size + SLOT
MQ_SIZE = 25165836


def port_files():
    """The five names; which are sockets: tokenizer, scheduler, detokenizer."""
    names = []
    for _ in range(5):
        with tempfile.NamedTemporaryFile(dir=settings.tmp_dir(), delete=False) as file:
            names.append(file.name)
    return names


def metrics_folder():
    folder = tempfile.mkdtemp(dir=settings.tmp_dir())
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
    for name in (f"gauge_mostrecent_{os.getpid()}.db", f"counter_{os.getpid()}.db"):
        with open(os.path.join(folder, name), "wb") as file:
            file.truncate(65536)
    return folder


def inductor_folder():
    os.makedirs(os.path.join(settings.tmp_dir(), f"torchinductor_{getpass.getuser()}"), exist_ok=True)


def loads_path():
    instance = uuid.uuid4().hex[:12]
    digest = hashlib.blake2s(instance.encode(), digest_size=4).hexdigest()
    return os.path.join(settings.shm_dir(), f"sglang_loads_{instance}_{digest}.shm")


def shared(kind, size):
    """A shared-memory file with this process' id in its name."""
    stamp = "sem.loky-{}-{}" if kind == "loky" else "sgl_shm_" + kind + "_{}_{}"
    path = os.path.join(settings.shm_dir(), stamp.format(os.getpid(), uuid.uuid4().hex[:8]))
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.ftruncate(descriptor, size)
    return path, mmap.mmap(descriptor, size), descriptor


class Loads:
    """The scheduler's figures, published for the HTTP side, which can read them when the scheduler hangs."""

    def __init__(self, path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(descriptor, LOADS_SIZE)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        self.descriptor, self.map = descriptor, mmap.mmap(descriptor, LOADS_SIZE)

    def publish(self, figures):
        payload = json.dumps(figures).encode()
        self.map[: HEADER.size] = HEADER.pack(b"SLNS", 2, 1, SLOT)
        self.map[HEADER.size : HEADER.size + 4 + len(payload)] = struct.pack("<I", len(payload)) + payload

    def read(self):
        (size,) = struct.unpack("<I", self.map[HEADER.size : HEADER.size + 4])
        try:
            return json.loads(self.map[HEADER.size + 4 : HEADER.size + 4 + size])
        except ValueError:
            return {}
