#!/usr/bin/python
# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: server_ready
short_description: Wait until a launched SGLang server really answers
version_added: 1.0.0
author:
  - Contributors to the cleanslate.inference collection (!UNKNOWN)
description:
  - Ready means that the server's own process listens on its port, that as many workers run as declared, and that a real
    generation comes back.
  - Shows the server's progress as it happens, and fails at once, with a diagnosis, when the server ends.
  - An action of the same name asks the node again and again, each time for at most O(window) seconds, so that a control
    node that goes away leaves nothing behind.
options:
  instance:
    description:
      - Name of a server that was launched by M(cleanslate.inference.server_launch).
    type: str
    required: true
  timeout:
    description:
      - Seconds that the server may take, counted from its launch. The default is C(ready_timeout) of its declaration.
    type: float
  window:
    description:
      - Seconds that one call on the node may take.
    type: float
    default: 10.0
  cursor:
    description:
      - Where the call before ended, as it returned it. The action fills it in.
    type: dict
    default: {}
extends_documentation_fragment:
  - cleanslate.inference.paths
  - cleanslate.inference.lease
attributes:
  check_mode:
    support: full
    description: Looks once and waits for nothing. A server that is not launched yet is no failure then.
  diff_mode:
    support: none
    description: There is nothing to compare.
  idempotent:
    support: full
    description: Notes in the record that the server became ready, and changes nothing else.
"""

EXAMPLES = r"""
- name: Wait for the server, at most ten minutes
  cleanslate.inference.server_ready:
    instance: main
    timeout: 600
"""

RETURN = r"""
instance:
  description: Name of the server.
  returned: always
  type: str
ready:
  description: Whether it is ready.
  returned: always
  type: bool
state:
  description: V(waiting), V(ready), V(failed) or V(not_launched).
  returned: always
  type: str
phase:
  description: The last phase of the start that its log showed.
  returned: always
  type: str
events:
  description: What happened, for people.
  returned: always
  type: list
  elements: str
cursor:
  description: Where this call ended.
  returned: always
  type: dict
elapsed:
  description: Seconds since the launch.
  returned: always
  type: float
workers:
  description: How many workers run.
  returned: when ready
  type: int
diagnosis:
  description: Why it failed, with C(cause), C(msg) and the last C(lines), secrets hidden.
  returned: when it failed
  type: dict
"""

from typing import Any, NoReturn

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.common.spec import LEASE_SPEC, PATHS_SPEC
from ansible_collections.cleanslate.inference.plugins.module_utils.sglang.run import wait_for_server

ARGUMENT_SPEC: dict[str, Any] = dict(
    PATHS_SPEC,
    **LEASE_SPEC,
    instance={"type": "str", "required": True},
    timeout={"type": "float"},
    window={"type": "float", "default": 10.0},
    cursor={"type": "dict", "default": {}},
)


def main() -> NoReturn:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    try:
        result = wait_for_server(module.params, module.check_mode)
    except CleanslateError as error:
        module.fail_json(msg=error.message, instance=module.params["instance"], **error.details)
    if result["state"] == "failed":
        module.fail_json(**result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
