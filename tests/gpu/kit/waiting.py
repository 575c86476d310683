# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From the signal to the verdict: a free check already waits when its GPU's only holder is killed.

Four moments: the signal goes out, the process has ended (its pidfd says so), the memory is back (told by the meter
outside), the verdict is there.
"""

from __future__ import annotations

import json
import select
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import methods, stage
from .states import Actor, State

STATE = State("watch", "a free check waits for the end of one CUDA process")


def play(order: Mapping[str, Any]) -> dict[str, Any]:
    """One measurement for each of C(order["deaths"]): MiB, and seconds between the first look and the signal."""
    cast = stage.Cast(Path(order["folder"]), order["simulate"])
    return {"deaths": [death(cast, order, mib, pause) for mib, pause in order["deaths"]]}


def death(cast: stage.Cast, order: Mapping[str, Any], mib: int, pause: float) -> dict[str, Any]:
    actor = Actor("job", mib=mib)
    process = cast.start(actor)
    cast.enter(actor, process)
    holder = cast.watched[-1]
    record = str(Path(order["record"]) / ("death-%d.gpu_free.json" % mib)) if order["record"] else ""
    request = {
        "module": "gpu_free",
        "params": dict(methods.params(order, STATE), timeout=30.0),
        "record": record,
        "watched": True,
    }
    with subprocess.Popen(
        [order["python"], str(Path(__file__).with_name("ours.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as check:
        assert check.stdin is not None and check.stdout is not None
        check.stdin.write(json.dumps(request))
        check.stdin.close()
        check.stdout.readline()
        select.select([], [], [], pause)
        signalled = time.monotonic()
        holder.kill()
        result = json.loads(check.stdout.readline() or "{}")
        check.wait()
    process.wait()
    stage.wait_for(lambda: holder.ended is not None, "the end of the holder")
    return {
        "mib": mib,
        "signalled": signalled,
        "ended": holder.ended,
        "finished": result.get("finished"),
        "verdict": result.get("verdict"),
        "looks": result.get("looks", []),
        "msg": result.get("msg", ""),
    }
