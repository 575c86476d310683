# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""One sweep from options to result."""

from __future__ import annotations

import typing as t

from ..common.text import format_size
from ..gpu.devices import REAL, is_simulated
from ..gpu.survey import uids_of
from ..proc.table import ProcFS
from ..state.lease import Lease
from .sweep import SweepOptions, sweep


def sweep_residue(
    params: t.Mapping[str, t.Any],
    check: bool = False,
    fs: ProcFS | None = None,
    pids: t.Iterable[int] | None = None,
) -> dict[str, t.Any]:
    """Do what module runtime_residue promises; returns its result.

    Raises CleanslateError before anything is removed.
    """
    simulated = is_simulated(params.get("dev_dir") or REAL)
    age = params.get("min_age")
    options = SweepOptions(
        shm_dir=params["shm_dir"],
        tmp_dir=params["tmp_dir"],
        unattributable=bool(params.get("unattributable")),
        min_age=None if age is None else float(age),
        uids=uids_of(params.get("users") or []),
        simulated=simulated,
    ).check()
    lease = Lease(params["run_dir"], params.get("lease"))
    if check:
        lease.check()
        swept = sweep(options, True, fs, pids)
    else:
        release = bool(params.get("release_lease"))
        with lease.held(float(params.get("lock_timeout") or 0.0), release=release):
            swept = sweep(options, False, fs, pids)
    verb = "Would remove" if check else "Removed"
    paths = sorted(entry["path"] for entry in swept.removed)
    return {
        "changed": bool(swept.removed),
        "removed": swept.removed,
        "kept": swept.kept,
        "freed": swept.freed,
        "scan": {"complete": not swept.unreadable, "unreadable": swept.unreadable},
        "simulated": simulated,
        "warnings": swept.warnings,
        "msg": "%s %d files (%s); kept %d." % (verb, len(swept.removed), format_size(swept.freed), len(swept.kept)),
        "diff": {
            "before_header": "files",
            "after_header": "files",
            "before": "".join(path + "\n" for path in sorted(paths + [entry["path"] for entry in swept.kept])),
            "after": "".join(path + "\n" for path in sorted(entry["path"] for entry in swept.kept)),
        },
    }
