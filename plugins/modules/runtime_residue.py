#!/usr/bin/python
# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: runtime_residue
short_description: Remove shared memory and sockets that dead inference servers left behind
version_added: 1.0.0
author:
  - Contributors to the cleanslate.inference collection (!UNKNOWN)
description:
  - Removes files of SGLang, NCCL, PyTorch, vLLM and CUDA from the shared memory and temporary folders, if their names
    are on an allow-list and nobody has them open, mapped or locked, and unix sockets on which nobody listens.
  - Names prove nothing there, since everybody may write to these folders. Symlinks, files with a second link, files of
    another type and of other owners are kept, and everything is done relative to the opened folder.
  - Works where it runs, in the mount and user namespace of the machine or container that it is called on.
options:
  shm_dir:
    description: Folder of POSIX shared memory.
    type: path
    default: /dev/shm
  tmp_dir:
    description: Folder of temporary files and sockets.
    type: path
    default: /tmp
  unattributable:
    description:
      - Also remove unused files whose names do not say whose they are, such as C(psm_*), C(sem.mp-*), C(sem.loky-*) and
        empty C(tmpXXXXXXXX).
    type: bool
    default: false
  min_age:
    description:
      - Seconds since the last change that a file must have.
      - Without it, V(0) for names that hold the pid of their maker, who must be dead in any case, and V(60) for others.
    type: float
  users:
    description:
      - Only files of these users (names or ids), and look only at their processes.
      - In the system's own folders such a confined look proves nothing, so that nothing is removed there.
    type: list
    elements: str
    default: []
  dev_dir:
    description:
      - Folder of the device nodes. Outside C(/dev) everything is a simulation, so that processes that may not be looked
        at do not count, except for the system's own folders.
    type: path
    default: /dev
  release_lease:
    description:
      - Drop the lease of O(lease) at the end, because this is the run's last step on this node.
    type: bool
    default: false
extends_documentation_fragment:
  - cleanslate.inference.lease
  - cleanslate.inference.paths
attributes:
  check_mode:
    description: Lists what would go, in RV(removed).
    support: full
  diff_mode:
    description: Shows the allow-listed files before and after.
    support: full
notes:
  - When any process may not be looked at, nothing is removed, and every file is kept with the reason
    C(scan_incomplete).
  - Run it after M(cleanslate.inference.gpu_free) has proved the GPUs free.
seealso:
  - module: cleanslate.inference.gpu_teardown
  - module: cleanslate.inference.gpu_free
"""

EXAMPLES = r"""
- name: Sweep after a teardown
  cleanslate.inference.runtime_residue:

- name: Also sweep nameless segments that are a day old
  cleanslate.inference.runtime_residue:
    unattributable: true
    min_age: 86400
"""

RETURN = r"""
removed:
  description: What was removed; in check mode, what would be.
  returned: always
  type: list
  elements: dict
  sample:
    - path: /dev/shm/sgl_shm_mq_4711_ab12cd
      kind: sglang shared memory
      size: 25165824
      owner: sglang
kept:
  description: What is or looks like residue and was kept, with C(reason) and C(detail).
  returned: always
  type: list
  elements: dict
  sample:
    - path: /dev/shm/nccl-AbC123
      kind: nccl shared memory
      size: 4096
      owner: sglang
      reason: in_use
      detail: by process 4711 (python3)
freed:
  description: Bytes of storage that were freed.
  returned: always
  type: int
scan:
  description: Whether every process could be looked at, and which could not.
  returned: always
  type: dict
simulated:
  description: Whether O(dev_dir) is outside C(/dev).
  returned: always
  type: bool
"""

from typing import Any, NoReturn

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.common.spec import LEASE_SPEC, PATHS_SPEC
from ansible_collections.cleanslate.inference.plugins.module_utils.residue.run import sweep_residue

ARGUMENT_SPEC: dict[str, Any] = dict(
    LEASE_SPEC,
    **PATHS_SPEC,
    shm_dir={"type": "path", "default": "/dev/shm"},
    tmp_dir={"type": "path", "default": "/tmp"},
    unattributable={"type": "bool", "default": False},
    min_age={"type": "float"},
    users={"type": "list", "elements": "str", "default": []},
    dev_dir={"type": "path", "default": "/dev"},
    release_lease={"type": "bool", "default": False},
)


def main() -> NoReturn:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    try:
        result = sweep_residue(module.params, module.check_mode)
    except CleanslateError as error:
        for warning in error.details.pop("warnings", ()):
            module.warn(warning)
        module.fail_json(msg=error.message, **error.details)
    for warning in result.pop("warnings"):
        module.warn(warning)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
