#!/usr/bin/python
# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: lease
short_description: Give a node back that a playbook run holds
version_added: 1.0.0
author:
  - Contributors to the cleanslate.inference collection (!UNKNOWN)
description:
  - From its plan to its proof a playbook run holds a lease of the node, so that no other run works on it meanwhile. The
    last step gives it back; this module does so where that step was not reached.
  - Only the lease of this run is dropped. That of another run, or none, is left as it is.
options:
  lease:
    description:
      - Id of the run, the same that its other tasks give as their option C(lease).
    type: str
    required: true
  state:
    description:
      - V(absent) drops the lease.
    type: str
    choices: [absent]
    default: absent
extends_documentation_fragment:
  - cleanslate.inference.paths
attributes:
  check_mode:
    support: full
    description: Says whether there is a lease of this run.
  diff_mode:
    support: none
    description: There is nothing to compare.
"""

EXAMPLES = r"""
- name: Let others have the node
  cleanslate.inference.lease:
    lease: "{{ cleanslate_run }}"
    state: absent
"""

RETURN = r"""
held_by:
  description: The run that holds the node after this task; empty when none does.
  returned: always
  type: str
"""

from typing import Any, NoReturn

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.common.spec import PATHS_SPEC
from ansible_collections.cleanslate.inference.plugins.module_utils.common.text import show
from ansible_collections.cleanslate.inference.plugins.module_utils.state.lease import Lease

ARGUMENT_SPEC: dict[str, Any] = dict(
    PATHS_SPEC,
    lease={"type": "str", "required": True},
    state={"type": "str", "choices": ["absent"], "default": "absent"},
)


def main() -> NoReturn:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    lease = Lease(module.params["run_dir"], module.params["lease"])
    try:
        held = lease.current()
        own = held is not None and held.run == lease.run
        changed = own if module.check_mode else lease.release()
    except CleanslateError as error:
        module.fail_json(msg=error.message, **error.details)
    module.exit_json(changed=changed, held_by="" if held is None or own else show(held.run))


if __name__ == "__main__":
    main()
