# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""One module call in a process of its own: what the modules that clean up do below their argument spec.

Reads a request from stdin, prints the result as one line. The defaults are the modules' own; where Ansible is at hand
a unit test compares them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
if __package__ in (None, ""):
    sys.path[:0] = [str(ROOT / ".collections"), str(ROOT / "tests/gpu")]

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError  # noqa: E402
from ansible_collections.cleanslate.inference.plugins.module_utils.common.spec import (  # noqa: E402
    LEASE_SPEC,
    PATHS_SPEC,
    SCAN_SPEC,
)
from ansible_collections.cleanslate.inference.plugins.module_utils.gpu import free as gpu_free  # noqa: E402
from ansible_collections.cleanslate.inference.plugins.module_utils.gpu import info as gpu_info  # noqa: E402
from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.survey import Surveyor  # noqa: E402
from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.verdict import Limits, judge  # noqa: E402
from ansible_collections.cleanslate.inference.plugins.module_utils.residue.run import sweep_residue  # noqa: E402
from ansible_collections.cleanslate.inference.plugins.module_utils.teardown.run import Seams, tear_down  # noqa: E402
from kit.recorder import Recorder  # noqa: E402

LEASE = {name: option.get("default") for name, option in LEASE_SPEC.items()}
SHARED = {name: option.get("default") for name, option in {**SCAN_SPEC, **PATHS_SPEC}.items()}
DEFAULTS: dict[str, dict[str, Any]] = {
    "gpu_info": SHARED,
    "gpu_free": {
        **SHARED,
        "expected_count": None,
        "memory_threshold": "128MiB",
        "memory_baseline": None,
        "timeout": 30.0,
        "interval": 0.05,
        "stable_polls": 2,
        "assume_ended": None,
    },
    "gpu_teardown": {
        **SHARED,
        **LEASE,
        "scope": None,
        "instances": [],
        "units": [],
        "match": [],
        "ports": [],
        "term_timeout": 10.0,
        "kill_timeout": 60.0,
    },
    "runtime_residue": {
        **{name: option.get("default") for name, option in PATHS_SPEC.items()},
        **LEASE,
        "shm_dir": "/dev/shm",
        "tmp_dir": "/tmp",
        "unattributable": False,
        "min_age": None,
        "users": [],
        "dev_dir": "/dev",
        "release_lease": False,
    },
}


def call(request: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
    module = request["module"]
    params = {**DEFAULTS[module], **request["params"]}
    surveyor: Any = recorder.surveyor if request.get("record") or request.get("watched") else Surveyor
    try:
        if module == "gpu_teardown":
            return tear_down(params, seams=Seams(surveyor=surveyor))
        if module == "runtime_residue":
            return sweep_residue(params)
        holder = gpu_free if module == "gpu_free" else gpu_info
        holder.Surveyor = surveyor
        return gpu_free.check_free(params, False) if module == "gpu_free" else gpu_info.gather(params)
    except CleanslateError as error:
        return {"failed": True, "msg": error.message, **error.details}


def say(data: dict[str, Any]) -> None:
    os.write(1, json.dumps(data, default=str).encode() + b"\n")


def main() -> None:
    request = json.loads(sys.stdin.read())
    recorder = Recorder()
    began = time.monotonic()
    if request.get("watched"):
        # Tell when it has begun to look: the trial goes on then.
        recorder.told = lambda: say({"looked": time.monotonic()}) if len(recorder.looks) == 1 else None
    result = call(request, recorder)
    result["finished"] = time.monotonic()
    result["inside"] = result["finished"] - began
    if request.get("watched"):
        result["looks"] = [(began, ended, judge(survey, Limits()).verdict) for began, ended, survey in recorder.looks]
    say(result)
    if request.get("record"):
        recorder.write(Path(request["record"]), request, result)


if __name__ == "__main__":
    main()
