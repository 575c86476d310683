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
            counted = _as_it_counts(process, environ or {}, gpus, fs, stat)
            if counted is None:
                return None
            named = [counted[int(entry)]] if int(entry) in counted else []
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


def _as_it_counts(
    process: Process, environ: t.Mapping[str, str], gpus: t.Sequence[Gpu], fs: ProcFS, stat: Stat
) -> dict[int, Gpu] | None:
    """The GPUs by the index that they have for this process; None when that cannot be established."""
    root = fs.path(process.pid, "root")
    elsewhere = os.path.isdir(root) and not os.path.samefile(root, "/")
    given = list(gpus)
    if elsewhere:
        # Another root: those count of which it has the node.
        given = [gpu for gpu in gpus if gpu.node and key_for_path(root + gpu.node.path, stat) == gpu.node.key]
    if not given or (environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len({gpu.name for gpu in given}) > 1):
        return None
    if not elsewhere:
        return {gpu.index: gpu for gpu in given}
    return dict(enumerate(sorted(given, key=lambda gpu: gpu.index)))
