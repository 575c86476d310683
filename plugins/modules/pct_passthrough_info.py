#!/usr/bin/python
# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: pct_passthrough_info
short_description: Check the devices that containers of a Proxmox VE node are given
version_added: 1.0.0
author:
  - Contributors to the cleanslate.inference collection (!UNKNOWN)
description:
  - Runs on the hypervisor. Compares every C(devN:), every C(lxc.mount.entry) of a device and every
    C(lxc.cgroup2.devices.allow) of its containers with the device nodes and drivers that the host has now.
  - Finds nodes that are missing, device rules whose major number moved with a reboot (nvidia-uvm and nvidia-caps do),
    nodes that a running container still has from before, libraries in the container that are not of the kernel
    module's version, GPUs given to more than one container, and lines that LXC ignores.
  - Each finding says what to change. Nothing is changed; M(cleanslate.inference.pct_passthrough) does that. With
    C(--diff) the lines are shown that it would write.
options:
  containers:
    description: Ids of the containers to look at. Empty means all of the node but templates.
    type: list
    elements: int
    default: []
attributes:
  check_mode:
    description: Changes nothing in either mode.
    support: full
  diff_mode:
    description: Shows what M(cleanslate.inference.pct_passthrough) would change.
    support: full
requirements:
  - Proxmox VE 8 or 9
  - Python 3.9 or later
  - root
seealso:
  - module: cleanslate.inference.pct_passthrough
"""

EXAMPLES = r"""
- name: Look at what the containers are given
  cleanslate.inference.pct_passthrough_info:
  register: passthrough

- name: Stop where a container could not use its GPUs
  ansible.builtin.assert:
    that: passthrough.ok
    fail_msg: "{{ passthrough.findings | map(attribute='msg') | join('\n') }}"
"""

RETURN = r"""
ok:
  description: Whether there is no finding of severity V(error).
  returned: always
  type: bool
findings:
  description:
    - What is wrong, with C(code), C(severity) (V(error) or V(warning)), C(vmid) (null for the
      host's own), C(path), C(msg) (what to change), C(fixable), and the lines to C(remove) and C(add).
    - Codes are V(missing_node), V(stale_node), V(plain_file), V(not_a_device), V(not_allowed), V(major_moved),
      V(cgroup1_rule), V(unused_rule), V(bad_line), V(absolute_target), V(duplicate_target), V(no_permission),
      V(restart_needed), V(missing_control_node), V(library_mismatch), V(no_library) and V(shared_gpu).
  returned: always
  type: list
  elements: dict
  sample:
    - code: major_moved
      severity: error
      vmid: 129
      path: /dev/nvidia-uvm
      msg: >-
        container 129 (llm): line 14 allows major number 509, which is nobody's now; /dev/nvidia-uvm has 511 since the
        last boot. Write `lxc.cgroup2.devices.allow: c 511:* rwm`; a devN: line would follow such moves by itself.
      fixable: true
      remove: ["lxc.cgroup2.devices.allow: c 509:* rwm"]
      add: ["lxc.cgroup2.devices.allow: c 511:* rwm"]
host:
  description: The hypervisor. C(devices) has the kind and numbers of what stands at each path.
  returned: always
  type: dict
  sample:
    node: pve1
    driver_version: 580.159.04
    majors: {nvidia: [195], nvidia-uvm: [511]}
    devices: {/dev/nvidia0: "c 195:0"}
containers:
  description: The containers that were looked at, with what they are given and what they have.
  returned: always
  type: list
  elements: dict
  sample:
    - vmid: 129
      name: llm
      running: true
      lock: ""
      unprivileged: false
      gpu_minors: [0]
      gpu_shared_with: []
      libraries: [580.159.04]
      devices:
        - line: "dev0: /dev/nvidia0,gid=44"
          source: /dev/nvidia0
          target: /dev/nvidia0
          on_host: "c 195:0"
          in_container: "c 195:0"
      rules: []
      findings: []
"""

from typing import Any, NoReturn

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.pct.passthrough import look

ARGUMENT_SPEC: dict[str, Any] = {"containers": {"type": "list", "elements": "int", "default": []}}


def main() -> NoReturn:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    try:
        result = look(module.params)
    except CleanslateError as error:
        module.fail_json(msg=error.message, **error.details)
    if not module._diff:
        del result["diff"]
    module.exit_json(**result)


if __name__ == "__main__":
    main()
