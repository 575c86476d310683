# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Module gpu_info: one look, told in full."""

from __future__ import annotations

import platform
import sys
import typing as t

from ..common.text import show
from ..proc.identity import require_kernel
from .devices import Gpu
from .survey import Survey, SurveyOptions, Surveyor
from .verdict import Limits, judge

# nvml.h: nvmlComputeMode_t
_COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}


def gather(params: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """The module's parameters in, its result out. Raises CleanslateError on parameters that mean nothing."""
    require_kernel()
    with Surveyor(SurveyOptions.from_params(params)) as surveyor:
        survey = surveyor.look()
    return describe_survey(survey)


def describe_survey(survey: Survey) -> dict[str, t.Any]:
    """What gpu_info returns of a survey."""
    verdict = judge(survey, Limits())
    result = verdict.data()
    judged = {gpu["index"]: gpu for gpu in result["gpus"]}
    # Whether the machine has as many GPUs as it should is for gpu_free, which knows how many that are.
    result["gpus"] = [_gpu(gpu, judged.get(gpu.index, {})) for gpu in survey.devices.gpus]
    del result["free"]
    nvml = survey.nvml
    return dict(
        result,
        nvml={"ok": nvml.ok, "reason": nvml.reason, "msg": nvml.message, "advice": nvml.advice},
        binding=nvml.binding,
        binding_missing=nvml.reason == "binding_missing",
        driver={"version": nvml.driver, "library": nvml.library, "cuda": nvml.cuda},
        stale=[{"path": show(stale.path), "reason": stale.why} for stale in survey.devices.stale],
        instances=sorted(record.name for record in survey.records),
        kernel=platform.release(),
        python={"version": platform.python_version(), "executable": sys.executable},
    )


def _gpu(gpu: Gpu, judged: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    nvml = gpu.nvml
    mode = nvml.compute_mode if nvml else None
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "pci": gpu.pci,
        "minor": gpu.minor,
        "name": show(gpu.name),
        "node": show(gpu.node.path) if gpu.node else "",
        "selected": gpu.selected,
        "verdict": judged.get("verdict", ""),
        "reasons": judged.get("reasons", []),
        "notes": judged.get("notes", []),
        "memory_used": nvml.memory_used if nvml else None,
        "memory_reserved": nvml.memory_reserved if nvml else None,
        "memory_total": nvml.memory_total if nvml else None,
        "utilization": nvml.utilization if nvml else None,
        "persistence": nvml.persistence if nvml else None,
        "compute_mode": None if mode is None else _COMPUTE_MODES.get(mode, str(mode)),
        "mig": [dict(device) for device in nvml.mig] if nvml and nvml.mig is not None else None,
        "recovery_action": nvml.recovery_action if nvml else "",
        "error": nvml.error.message if nvml and nvml.error else "",
        "holders": judged.get("holders", []),
    }
