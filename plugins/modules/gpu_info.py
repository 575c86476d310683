#!/usr/bin/python
# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_info
short_description: Show the GPUs of a node and who holds them
version_added: 1.0.0
author:
  - Contributors to the cleanslate.inference collection (!UNKNOWN)
description:
  - Changes nothing, waits for nothing, and does not fail because a GPU is busy or the driver does not answer.
  - Returns what the other modules of this collection see; each holder with its user, unit, container, pids and redacted
    command line.
extends_documentation_fragment:
  - cleanslate.inference.scan
  - cleanslate.inference.paths
attributes:
  check_mode:
    description: Changes nothing in either mode.
    support: full
  diff_mode:
    description: There is nothing to compare.
    support: none
requirements:
  - Linux 5.3 or later
  - Python 3.9 or later
seealso:
  - module: cleanslate.inference.gpu_free
"""

EXAMPLES = r"""
- name: Look at the GPUs
  cleanslate.inference.gpu_info:
  register: gpus

- name: Show who holds what
  ansible.builtin.debug:
    msg: "{{ item.pid }} {{ item.user }} {{ item.cmdline }} {{ item.devices | join(' ') }}"
  loop: "{{ gpus.holders }}"
  loop_control:
    label: "{{ item.pid }}"
"""

RETURN = r"""
gpus:
  description: All GPUs of the machine; C(selected) says whether O(devices) means it. Memory in bytes.
  returned: always
  type: list
  elements: dict
  sample:
    - index: 0
      uuid: GPU-4f2e6d3c-1b0a-4c5d-8e9f-001122334455
      pci: "00000000:1B:00.0"
      minor: 0
      name: NVIDIA H200
      node: /dev/nvidia0
      selected: true
      verdict: free
      reasons: []
      notes: []
      memory_used: 0
      memory_reserved: 644939776
      memory_total: 150754820096
      utilization: 0
      persistence: true
      compute_mode: default
      mig:
      recovery_action: none
      error: ""
      holders: []
holders:
  description: Processes that hold a chosen GPU, one row each, as in M(cleanslate.inference.gpu_free).
  returned: always
  type: list
  elements: dict
benign_holders:
  description: Processes that are always spared.
  returned: always
  type: list
  elements: dict
neighbours:
  description: Processes that have a node open and use other GPUs.
  returned: always
  type: list
  elements: dict
nvml_processes:
  description: What NVML lists, with C(in_proc) and C(holder). Evidence only.
  returned: always
  type: list
  elements: dict
nvml:
  description: Whether NVML answers (C(ok)), else C(reason), C(msg) and C(advice).
  returned: always
  type: dict
  sample: {ok: true, reason: "", msg: "", advice: ""}
binding:
  description: Where nvidia-ml-py was found, V(interpreter) or V(pynvml_path); empty when NVML was not reached.
  returned: always
  type: str
binding_missing:
  description: Whether this node's Python has no nvidia-ml-py.
  returned: always
  type: bool
driver:
  description: Versions of the driver, of NVML's library and of CUDA; empty when NVML does not answer.
  returned: always
  type: dict
  sample: {version: 580.159.04, library: 13.580.159.04, cuda: "13.0"}
verdict:
  description: What M(cleanslate.inference.gpu_free) would say now, from a single look.
  returned: always
  type: str
reasons:
  description: Codes of everything that stands against V(free).
  returned: always
  type: list
  elements: str
notes:
  description: Codes of what does not.
  returned: always
  type: list
  elements: str
details:
  description: Each reason and note in full.
  returned: always
  type: list
  elements: dict
stale:
  description: Nodes that are not what their names say.
  returned: always
  type: list
  elements: dict
instances:
  description: Names of the instances recorded on this node.
  returned: always
  type: list
  elements: str
scan:
  description: C(complete), how many C(processes) were looked at, and which were C(unreadable).
  returned: always
  type: dict
kernel:
  description: Release of the kernel.
  returned: always
  type: str
python:
  description: Version and path of the Python that runs modules here.
  returned: always
  type: dict
  sample: {version: 3.12.3, executable: /usr/bin/python3}
simulated:
  description: Whether O(dev_dir) is outside C(/dev), so that plain files stood for GPUs.
  returned: always
  type: bool
"""

from typing import Any, NoReturn

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.common.spec import PATHS_SPEC, SCAN_SPEC
from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.info import gather

ARGUMENT_SPEC: dict[str, Any] = dict(SCAN_SPEC, **PATHS_SPEC)


def main() -> NoReturn:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    try:
        result = gather(module.params)
    except CleanslateError as error:
        module.fail_json(msg=error.message, **error.details)
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
