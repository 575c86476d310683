#!/usr/bin/python
# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: server_proof
short_description: Prove that a running SGLang server is the declared one
version_added: 1.0.0
author:
  - Contributors to the cleanslate.inference collection (!UNKNOWN)
description:
  - Reads the environment of every process of the server and compares it with the declaration as it was launched.
    Variables that SGLang itself sets are told apart, with the reason.
  - Compares the server's own account of its arguments (C(/server_info)) with the declared ones.
  - Fails when something is missing or different. A server that is too busy to give its account does not fail. What it
    said earlier is compared then, and a note says so.
options:
  instance:
    description:
      - Name of a server that was launched by M(cleanslate.inference.server_launch).
    type: str
    required: true
  lease:
    description:
      - Id of the playbook run whose lease O(release_lease) drops.
    type: str
  release_lease:
    description:
      - Drop the lease of O(lease) at the end, proven or not. For the last step of a playbook.
    type: bool
    default: false
  timeout:
    description:
      - Seconds that the server may take to give its account.
    type: float
    default: 20.0
extends_documentation_fragment:
  - cleanslate.inference.paths
attributes:
  check_mode:
    support: full
    description: A server that is not launched or not ready yet is no failure then.
  diff_mode:
    support: none
    description: There is nothing to change.
  idempotent:
    support: full
    description: Changes nothing.
"""

EXAMPLES = r"""
- name: Prove that the server runs as declared
  cleanslate.inference.server_proof:
    instance: main
"""

RETURN = r"""
instance:
  description: Name of the server.
  returned: always
  type: str
proven:
  description: Whether everything is as declared.
  returned: always
  type: bool
processes:
  description: Every process of the server, with C(pid), C(role), C(rank), how many variables were C(checked), and which
    are C(missing), C(different) and C(set_by_sglang).
  returned: always
  type: list
  elements: dict
arguments:
  description: Every declared argument that the server tells about, with C(requested), C(effective), C(equal), and the
    C(reason) when SGLang changes it.
  returned: always
  type: list
  elements: dict
problems:
  description: What is not as declared, in sentences.
  returned: always
  type: list
  elements: str
notes:
  description: What is worth knowing and is no problem.
  returned: always
  type: list
  elements: str
workers:
  description: How many workers run.
  returned: always
  type: int
simulated:
  description: Whether plain files stood for GPUs.
  returned: always
  type: bool
"""

from typing import Any, NoReturn

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.common.spec import PATHS_SPEC
from ansible_collections.cleanslate.inference.plugins.module_utils.sglang.run import prove_server

ARGUMENT_SPEC: dict[str, Any] = dict(
    PATHS_SPEC,
    instance={"type": "str", "required": True},
    lease={"type": "str"},
    release_lease={"type": "bool", "default": False},
    timeout={"type": "float", "default": 20.0},
)


def main() -> NoReturn:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    try:
        result = prove_server(module.params, module.check_mode)
    except CleanslateError as error:
        module.fail_json(msg=error.message, instance=module.params["instance"], **error.details)
    if result.get("failed"):
        module.fail_json(**result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
