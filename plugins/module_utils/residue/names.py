# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Names that dead inference servers leave behind: the allow-list. What is not on it is never touched.

Sources: sglang 0.5.23 (srt/utils/stale_shm_cleanup.py, managers/mm_utils.py, managers/multi_tokenizer_mixin.py,
managers/load_snapshot.py, mmap_allocator.py, server_args.py, environ.py, weight_cache), NVIDIA/nccl src/os/linux.cc,
pytorch aten/src/ATen/MapAllocator.cpp, vllm-project/vllm issue 51317, CPython multiprocessing/shared_memory.py and
synchronize.py, joblib/loky.
"""

from __future__ import annotations

import re
import typing as t

FILE = "file"
SOCKET = "socket"


class Kind(t.NamedTuple):
    """One family of names."""

    #: Who leaves it.
    name: str
    #: Whole base name; a group C(pid) is the process that made it, as its own PID namespace counts.
    pattern: re.Pattern[str]
    #: C(file) or C(socket): any other type under this name was planted.
    type: str
    #: Whether the name says whose it is. Others are touched only on request.
    attributable: bool = True
    #: Whether only empty files of this name are residue.
    empty: bool = False


def _kind(name: str, pattern: str, kind: str = FILE, attributable: bool = True, empty: bool = False) -> Kind:
    return Kind(name, re.compile(pattern, re.ASCII), kind, attributable, empty)


_PID = r"(?P<pid>[1-9][0-9]{0,9})"

#: In C(/dev/shm).
SHM: tuple[Kind, ...] = (
    _kind("sglang shared memory", r"sgl_shm_[a-z]+_" + _PID + r"_[A-Za-z0-9_.-]+"),
    _kind("sglang tokenizer arguments", r"multi_tokenizer_args_" + _PID),
    _kind("sglang load snapshot", r"sglang_loads_[A-Za-z0-9_.-]+\.shm"),
    _kind("sglang host memory pool", r"sglang_host_pool_[A-Za-z0-9_.-]+"),
    _kind("nccl shared memory", r"nccl-[A-Za-z0-9]{6}"),
    _kind("cuda shared memory", r"cuda\.shm\.[A-Za-z0-9_.-]+"),
    _kind("torch shared memory", r"torch_" + _PID + r"_[A-Za-z0-9_.-]+"),
    _kind("vllm offload buffer", r"vllm_offload_[A-Za-z0-9_.-]+"),
    _kind("loky semaphore", r"(?:sem\.)?loky-" + _PID + r"-[A-Za-z0-9_.-]+", attributable=False),
    _kind("python semaphore", r"sem\.mp-[a-z0-9_]{8}", attributable=False),
    _kind("python shared memory", r"psm_[0-9a-f]{8}", attributable=False),
)

#: In C(/tmp). SGLang makes empty files tmpXXXXXXXX and binds its sockets over some of them.
TMP: tuple[Kind, ...] = (
    _kind("sglang socket", r"tmp[A-Za-z0-9_]{8}", SOCKET),
    _kind("sglang load collector socket", r"sglang_load_collector_[A-Za-z0-9_.-]+\.sock", SOCKET),
    _kind("sglang weight cache socket", r"sglang_weight_cache_[A-Za-z0-9_.-]+\.sock", SOCKET),
    _kind("sglang trace socket", r"sglang_trace_" + _PID + r"\.sock", SOCKET),
    _kind("sglang weight cache mark", r"sglang_weight_cache_[A-Za-z0-9_.-]+\.ready"),
    _kind("sglang numa wrapper", r"sglang_temp_file_[A-Za-z0-9_.-]+\.sh"),
    _kind("python temporary file", r"tmp[A-Za-z0-9_]{8}", FILE, attributable=False, empty=True),
)

#: Beginnings that make a name look like residue. Such names are reported as kept when no family fits, so that a reader
#: sees that they were noticed: sglang_download_lock_N is a lock in use across runs, nccl-evil1 is nobody's.
LOOKALIKE = re.compile(r"sgl_|sglang_|nccl-|cuda\.shm\.|torch_\d|multi_tokenizer_|vllm_offload|psm_|sem\.(?:mp|loky)-")


def kinds_of(name: str, kinds: t.Iterable[Kind]) -> list[Kind]:
    """The families that a base name may belong to (a file and a socket may share a name's form)."""
    return [kind for kind in kinds if kind.pattern.fullmatch(name)]


def pid_in(name: str, kind: Kind) -> int | None:
    """The process that a name says made it; None when the name has none."""
    match = kind.pattern.fullmatch(name)
    if match is None or "pid" not in kind.pattern.groupindex:
        return None
    return int(match.group("pid"))
