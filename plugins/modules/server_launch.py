#!/usr/bin/python
# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: server_launch
short_description: Start a declared SGLang server
version_added: 1.0.0
author:
  - Contributors to the cleanslate.inference collection (!UNKNOWN)
description:
  - Writes the unit, its environment, the file with the keys and the record, and starts the server, in one call.
  - Refuses when the GPUs or the port are not free. Returns once the server's program runs; whether it becomes ready is
    the matter of M(cleanslate.inference.server_ready).
options:
  instance:
    description:
      - Name of the server, of its record, its unit and its files.
    type: str
    required: true
  rollback:
    description:
      - Start the last declaration of this server that became ready instead of O(declaration), of which only the secrets
        are taken. Where there is none nothing is started, and RV(rolled_back) is false.
    type: bool
    default: false
extends_documentation_fragment:
  - cleanslate.inference.declaration
  - cleanslate.inference.scan
  - cleanslate.inference.paths
  - cleanslate.inference.lease
attributes:
  check_mode:
    support: full
    description: Says what would be written and started. Whether GPUs and port are free is not looked at then.
  diff_mode:
    support: full
    description: Shows the declaration and the unit before and after, secrets hidden.
  idempotent:
    support: full
    description: A server that runs exactly as declared is left alone.
notes:
  - O(devices) is not used; the GPUs are those of O(declaration.gpus).
"""

EXAMPLES = r"""
- name: Start the declared server without systemd
  cleanslate.inference.server_launch:
    instance: main
    declaration:
      model_path: /srv/models/llama-3.3-70b
      gpus: [0, 1, 2, 3]
      tp_size: 4
      backend: process
"""

RETURN = r"""
instance:
  description: Name of the server.
  returned: always
  type: str
pid:
  description: Its main process; 0 in check mode.
  returned: success
  type: int
start_time:
  description: Start time of the main process, in clock ticks since boot.
  returned: success
  type: int
backend:
  description: How it was started.
  returned: success
  type: str
unit:
  description: The systemd unit, empty without one.
  returned: success
  type: str
log:
  description: Where the server's output is.
  returned: success
  type: str
argv:
  description: The command line. It never holds a key.
  returned: success
  type: list
  elements: str
environment:
  description: What the declaration adds to the environment, secrets hidden.
  returned: success
  type: dict
rolled_back:
  description: Whether an earlier declaration was started.
  returned: success
  type: bool
written:
  description: Files that were written.
  returned: success
  type: list
  elements: str
simulated:
  description: Whether plain files stood for GPUs.
  returned: success
  type: bool
"""

from typing import Any, NoReturn

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.common.spec import (
    LEASE_SPEC,
    PATHS_SPEC,
    SCAN_SPEC,
)
from ansible_collections.cleanslate.inference.plugins.module_utils.sglang.declaration import (
    DECLARATION_SPEC,
    Declaration,
)
from ansible_collections.cleanslate.inference.plugins.module_utils.sglang.run import launch_server

ARGUMENT_SPEC: dict[str, Any] = dict(
    SCAN_SPEC,
    **LEASE_SPEC,
    **PATHS_SPEC,
    instance={"type": "str", "required": True},
    declaration={"type": "dict", "required": True, "options": DECLARATION_SPEC},
    rollback={"type": "bool", "default": False},
)


def main() -> NoReturn:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    try:
        declaration = Declaration.from_params(module.params["instance"], module.params["declaration"])
        module.no_log_values.update(declaration.secrets())
        result = launch_server(declaration, module.params, module.check_mode)
    except CleanslateError as error:
        module.fail_json(msg=error.message, instance=module.params["instance"], **error.details)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
