# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Recordings of what the modules saw: enough of each look to judge it again on a machine without GPUs."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.survey import Survey, SurveyOptions, Surveyor
from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.verdict import Limits, judge

_FIELDS = ("comm", "state", "ppid", "pgrp", "session", "threads", "start_time", "exiting")


class Recorder:
    """Keeps every survey; what is written of them is made afterwards."""

    def __init__(self) -> None:
        #: Monotonic times of the beginning and the end of each look, and what was seen.
        self.looks: list[tuple[float, float, Survey]] = []
        #: Called after each look.
        self.told: Callable[[], None] = lambda: None

    def surveyor(self, options: SurveyOptions) -> Surveyor:
        looks, told = self.looks, self

        class Recording(Surveyor):
            def look(self, nvml: bool = True) -> Survey:
                began = time.monotonic()
                survey = super().look(nvml)
                # A look without NVML is judged by nobody.
                if nvml:
                    looks.append((began, time.monotonic(), survey))
                    told.told()
                return survey

        return Recording(options)

    def data(self, request: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
        """What was asked, the looks that differ from the one before, and who was ended or spared for what reason."""
        looks: list[dict[str, Any]] = []
        for _began, _ended, survey in self.looks:
            look = seen(survey)
            if not looks or look != looks[-1]:
                looks.append(look)
        params = request["params"]
        out: dict[str, Any] = {
            "module": request["module"],
            "options": {name: params[name] for name in ("scope", "devices", "protect") if name in params},
            "looks": looks,
        }
        for what in ("killed", "spared"):
            if what in result:
                out[what] = {row["pid"]: row["reason"] for row in result[what]}
        return out

    def write(self, path: Path, request: dict[str, Any], result: dict[str, Any]) -> None:
        path.write_text(json.dumps(self.data(request, result), indent=1) + "\n")


def seen(survey: Survey) -> dict[str, Any]:
    """One look: who holds which nodes, what NVML said, and the verdict on it."""
    verdict = judge(survey, Limits())
    nodes = {key: path.rpartition("/")[2] for key, path in survey.devices.labels.items()}
    listed = {process.pid for gpu in survey.nvml.gpus for process in gpu.processes}
    rows = []
    for pid in sorted({*survey.scan.found, *listed} - survey.own_pids):
        process = survey.table.get(pid)
        if process is None:
            continue
        found = survey.scan.found.get(pid)
        row = {name: getattr(process, name) for name in ("pid", *_FIELDS)}
        row.update(
            argv=[word.rpartition("/")[2] for word in process.argv],
            visible=(process.environ or {}).get("CUDA_VISIBLE_DEVICES"),
            nspid=process.nspid,
            thread_only=found is not None and found.thread_only,
            opened=sorted(nodes[key] for key in found.opened if key in nodes) if found else [],
            mapped=sorted(nodes[key] for key in found.mapped if key in nodes) if found else [],
        )
        rows.append(row)
    return {
        "processes": rows,
        "nvml": nvml(survey),
        "verdict": verdict.verdict,
        "reasons": list(dict.fromkeys(reason.code for reason in verdict.reasons)),
        "gpus": {gpu.gpu.index: gpu.verdict for gpu in verdict.gpus},
    }


def nvml(survey: Survey) -> dict[str, Any]:
    """What NVML said, without what tells one card from another."""
    data = dataclasses.asdict(survey.nvml)
    for gpu in data["gpus"]:
        gpu["uuid"] = "GPU-fa4e0000-0000-4000-8000-%012x" % (gpu["minor"] or 0)
        gpu["pci"] = "00000000:%02X:00.0" % (0x19 + (gpu["minor"] or 0))
    return data
