#!/usr/bin/python
# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: pct_passthrough
short_description: Mend the device lines of containers of a Proxmox VE node
version_added: 1.0.0
author:
  - Contributors to the cleanslate.inference collection (!UNKNOWN)
description:
  - Finds what M(cleanslate.inference.pct_passthrough_info) finds, and changes the lines where lines can mend it. Those
    are rules whose major number moved, missing rules, rules of cgroup version 1, missing control nodes, targets with a
    leading slash, and repeated lines.
  - Every configuration is copied before it is changed, and changed under Proxmox VE's own lock. Snapshots, notes and
    all other lines stay as they are. A locked container is left alone and named.
  - A running container has the change after its next start; it is not restarted.
options:
  state:
    description: Only V(fixed).
    type: str
    choices: [fixed]
    default: fixed
  containers:
    description: Ids of the containers to mend. Empty means all of the node but templates.
    type: list
    elements: int
    default: []
  backup_dir:
    description: Folder for the copies, C(VMID.conf.DATE-TIME), which only root can read.
    type: path
    default: /var/lib/cleanslate/pct-backup
attributes:
  check_mode:
    description: Says what would be changed.
    support: full
  diff_mode:
    description: Shows the lines.
    support: full
requirements:
  - Proxmox VE 8 or 9
  - Python 3.9 or later
  - root
seealso:
  - module: cleanslate.inference.pct_passthrough_info
"""

EXAMPLES = r"""
- name: Let the containers' device rules follow the drivers after a reboot of the hypervisor
  cleanslate.inference.pct_passthrough:
    state: fixed
  register: passthrough

- name: Restart the containers that were mended
  cleanslate.inference.pct_exec:
    containers: "{{ passthrough.fixed | selectattr('restart') | map(attribute='vmid') }}"
    state: restarted
"""

RETURN = r"""
fixed:
  description: What was changed, container by container; C(restart) says whether it runs and has the change later.
  returned: always
  type: list
  elements: dict
  sample:
    - vmid: 129
      name: llm
      codes: [major_moved]
      backup_file: /var/lib/cleanslate/pct-backup/129.conf.20260801-120000
      restart: true
kept:
  description: What would have been changed and was not, with the C(reason).
  returned: always
  type: list
  elements: dict
ok:
  description: Whether afterwards there is no finding of severity V(error).
  returned: always
  type: bool
findings:
  description:
    - What is still wrong, with C(code), C(severity) (V(error) or V(warning)), C(vmid) (null for the
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
from ansible_collections.cleanslate.inference.plugins.module_utils.pct.passthrough import mend

ARGUMENT_SPEC: dict[str, Any] = {
    "state": {"type": "str", "choices": ["fixed"], "default": "fixed"},
    "containers": {"type": "list", "elements": "int", "default": []},
    "backup_dir": {"type": "path", "default": "/var/lib/cleanslate/pct-backup"},
}


def main() -> NoReturn:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    try:
        result = mend(module.params, module.check_mode)
    except CleanslateError as error:
        module.fail_json(msg=error.message, **error.details)
    if not module._diff:
        del result["diff"]
    module.exit_json(**result)


if __name__ == "__main__":
    main()
