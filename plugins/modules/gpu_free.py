#!/usr/bin/python
# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_free
short_description: Prove that GPUs are free, or fail and say who holds them
version_added: 1.0.0
author:
  - Contributors to the cleanslate.inference collection (!UNKNOWN)
description:
  - Changes nothing. Looks until the chosen GPUs are proven free, or until that cannot happen any more.
  - A GPU is free when no task of any process holds its device node, NVML lists no process on it, its memory is back,
    and all that stays so in several looks. Holders and memory are both needed; an idle server shows hardly any memory,
    and memory outlives its holder.
  - What cannot be seen is V(unknown) and fails, as V(busy) does. Only V(free) passes.
  - Daemons of the driver, monitoring tools, display servers, and processes that have the node open while they use other
    GPUs are listed and do not count.
options:
  expected_count:
    description:
      - How many GPUs the machine must have, whatever O(devices) says. More is a mismatch as well.
      - The default is the number of C(nvidiaN) nodes in O(dev_dir). No node at all passes only with an explicit V(0).
    type: int
  memory_threshold:
    description:
      - Memory in use up to which a GPU counts as free, without what the driver keeps for itself.
    type: str
    default: 128MiB
  memory_baseline:
    description:
      - What an idle GPU shows where the driver cannot tell its own reserve from use (NVML memory of version 1 only).
      - Without it such a GPU is never V(free).
    type: str
  timeout:
    description:
      - Seconds to wait. What waiting cannot change ends it at once.
    type: float
    default: 30.0
  interval:
    description:
      - Seconds from the beginning of one look to that of the next. Where only memory lags behind its last holder it
        looks more often for a second.
    type: float
    default: 0.05
  stable_polls:
    description:
      - So many looks in a row must find the GPUs free.
    type: int
    default: 2
  assume_ended:
    description:
      - Check mode only. Processes that would have been ended by now, by C(pid) and C(start_time), as the rows of
        M(cleanslate.inference.gpu_teardown) have them. RV(predicted_verdict) leaves them and their memory out and
        decides; RV(verdict) stays as measured.
    type: list
    elements: dict
extends_documentation_fragment:
  - cleanslate.inference.scan
  - cleanslate.inference.paths
attributes:
  check_mode:
    description: Changes nothing in either mode; only O(assume_ended) makes a difference.
    support: full
  diff_mode:
    description: There is nothing to compare.
    support: none
requirements:
  - Linux 5.3 or later
  - Python 3.9 or later
  - nvidia-ml-py, of the interpreter or in O(pynvml_path)
seealso:
  - module: cleanslate.inference.gpu_info
  - module: cleanslate.inference.gpu_teardown
"""

EXAMPLES = r"""
- name: All eight GPUs must be free
  cleanslate.inference.gpu_free:
    expected_count: 8

- name: Two GPUs of a shared machine must be free
  cleanslate.inference.gpu_free:
    devices:
      - GPU-4f2e6d3c-1b0a-4c5d-8e9f-001122334455
      - 00000000:1B:00.0
    timeout: 60
"""

RETURN = r"""
free:
  description: Whether RV(verdict) is V(free).
  returned: always
  type: bool
verdict:
  description: V(free), V(busy), or V(unknown) when something could not be seen.
  returned: always
  type: str
predicted_verdict:
  description: What the verdict will be once O(assume_ended) has ended. It decides then.
  returned: with O(assume_ended)
  type: str
reasons:
  description:
    - Codes of everything that stands against V(free). In full in RV(details).
    - V(holder), V(foreign_holder), V(memory_no_owner), V(memory_benign_holder), V(owner_other_namespace),
      V(invalid_pid), V(nvml_unavailable), V(binding_missing), V(nvml_timeout), V(gpu_lost), V(reset_required),
      V(version_mismatch), V(scan_incomplete), V(stale_device_node), V(count_mismatch).
  returned: always
  type: list
  elements: str
notes:
  description:
    - Codes of what does not stand against it, for example V(open_only), V(memory_unmeasurable), V(utilization).
  returned: always
  type: list
  elements: str
details:
  description: Each reason and note with C(code), C(msg), C(advice), C(gpu) and C(pid).
  returned: always
  type: list
  elements: dict
gpus:
  description: The chosen GPUs, each with its own verdict, reasons, notes, memory (bytes) and holders.
  returned: always
  type: list
  elements: dict
  sample:
    - index: 0
      uuid: GPU-4f2e6d3c-1b0a-4c5d-8e9f-001122334455
      minor: 0
      name: NVIDIA H200
      verdict: free
      reasons: []
      notes: []
      memory_used: 0
      memory_reserved: 644939776
      memory_total: 150754820096
      holders: []
holders:
  description: Processes that hold a chosen GPU.
  returned: always
  type: list
  elements: dict
  sample:
    - pid: 4711
      start_time: 120000
      user: sglang
      comm: "sglang::schedul"
      cmdline: "sglang::scheduler_TP0"
      devices: [/dev/nvidia0]
      gpus: [0]
      unit: sglang-main.service
      container: ""
      guest_pid: 4711
      gpu_memory: 46013612032
      decision: holder
      reason: "GPU 0: has it mapped"
benign_holders:
  description: Processes that hold a chosen GPU and are always spared, like RV(holders).
  returned: always
  type: list
  elements: dict
neighbours:
  description: Processes that have the node of a chosen GPU open and use other GPUs, like RV(holders).
  returned: always
  type: list
  elements: dict
nvml_processes:
  description:
    - What NVML lists. C(in_proc) says whether a process of this pid lives here, C(holder) whether it holds that GPU.
      Evidence only; the pid may be that of a dead process, or of another PID namespace.
  returned: always
  type: list
  elements: dict
scan:
  description: C(complete), how many C(processes) were looked at, and which were C(unreadable).
  returned: always
  type: dict
simulated:
  description: Whether O(dev_dir) is outside C(/dev), so that plain files stood for GPUs.
  returned: always
  type: bool
waited:
  description: Seconds until the verdict.
  returned: always
  type: float
polls:
  description: How many looks it took.
  returned: always
  type: int
"""

from typing import Any, NoReturn

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.common.spec import PATHS_SPEC, SCAN_SPEC
from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.free import check_free

ARGUMENT_SPEC: dict[str, Any] = dict(
    SCAN_SPEC,
    **PATHS_SPEC,
    expected_count={"type": "int"},
    memory_threshold={"type": "str", "default": "128MiB"},
    memory_baseline={"type": "str"},
    timeout={"type": "float", "default": 30.0},
    interval={"type": "float", "default": 0.05},
    stable_polls={"type": "int", "default": 2},
    assume_ended={"type": "list", "elements": "dict"},
)


def main() -> NoReturn:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    try:
        result = check_free(module.params, module.check_mode)
    except CleanslateError as error:
        module.fail_json(msg=error.message, **error.details)
    if result.get("predicted_verdict", result["verdict"]) != "free":
        module.fail_json(changed=False, **result)
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
