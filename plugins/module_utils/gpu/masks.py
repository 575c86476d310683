# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""What C(CUDA_VISIBLE_DEVICES) says about the GPUs that a process may use.

Facts used (CUDA programming guide, environment variables): entries are indices or unique beginnings of a UUID; the list
ends at the first entry that means nothing; indices follow C(CUDA_DEVICE_ORDER), by default the fastest GPU first, so
among different models they are not NVML's; in a container they count the GPUs that it was given.
"""

from __future__ import annotations

import os
import typing as t

from ..proc.scan import Stat, key_for_path
from ..proc.table import Process, ProcFS
from .devices import Devices, Gpu, uuids


def visible(process: Process, devices: Devices, fs: ProcFS, stat: Stat = os.stat) -> list[Gpu] | None:
    """The GPUs that the variable names, None when that cannot be established (unset, unreadable, ambiguous)."""
    environ = process.environ
    value = (environ or {}).get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    out: list[Gpu] = []
    gpus = [gpu for gpu in devices.gpus if not gpu.hidden]
    for entry in value.split(","):
        entry = entry.strip()
        if entry.isdigit():
            if not _indices_mean_the_same(process, environ or {}, gpus, fs, stat):
                return None
            named = [gpu for gpu in gpus if gpu.index == int(entry)]
        elif entry.upper().startswith(("GPU-", "MIG-")):
            named = [gpu for gpu in gpus if any(uuid.lower().startswith(entry.lower()) for uuid in uuids(gpu))]
            if not named and not devices.identified:
                return None
        else:
            named = []
        if len(named) != 1:
            break
        out += named
    return out


def names_only_others(process: Process, gpu: Gpu, devices: Devices, fs: ProcFS, stat: Stat = os.stat) -> bool:
    """Whether the variable names GPUs, and this one is not among them."""
    named = visible(process, devices, fs, stat)
    return bool(named) and named is not None and gpu not in named


def _indices_mean_the_same(
    process: Process, environ: t.Mapping[str, str], gpus: t.Sequence[Gpu], fs: ProcFS, stat: Stat
) -> bool:
    if environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len({gpu.name for gpu in gpus}) > 1:
        return False
    root = fs.path(process.pid, "root")
    if not os.path.isdir(root) or os.path.samefile(root, "/"):
        return True
    # Another root: its own /dev must hold the same nodes.
    return all(gpu.node is None or key_for_path(root + gpu.node.path, stat) == gpu.node.key for gpu in gpus)
