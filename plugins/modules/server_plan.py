#!/usr/bin/python
# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: server_plan
short_description: Say what bringing a declared SGLang server up would do, and what stands in its way
version_added: 1.0.0
author:
  - Contributors to the cleanslate.inference collection (!UNKNOWN)
description:
  - Compares a declared server with the one that runs, and checks everything that can be checked while the old one still
    serves. The declaration on paper, NCCL's variables, the command line by the parser and resolver of the installed
    SGLang, the model's files, the GPUs and their holders, the port, and what a teardown would end.
  - All findings are told at once, each with the variable to change. Nothing on the node is changed but the lease.
  - A server that was launched by a run that did not wait for it, and that turns out to serve, is recorded as ready.
  - A server is left untouched as long as there is any doubt about it. A busy one is not broken.
options:
  instance:
    description:
      - Name of the server, of its record, its unit and its files.
    type: str
    required: true
  reset:
    description:
      - V(auto) resets only what is not as declared; V(always) resets in any case.
    type: str
    choices: [auto, always]
    default: auto
  assume_ended:
    description:
      - Rows of RV(teardown) of plans for other servers of this node, whom the same run will have ended before this plan
        is carried out. They do not stand in the way.
    type: list
    elements: dict
    default: []
  release_lease:
    description:
      - Drop the lease of O(lease) when there is nothing to do. Where the module fails it is dropped in any case, and
        where a reset will follow it is kept.
    type: bool
    default: false
  teardown:
    description:
      - What M(cleanslate.inference.gpu_teardown) will be told, for the plan of what it would end.
    type: dict
    default: {}
    suboptions:
      scope:
        description:
          - Scope of the teardown.
        type: str
        choices: [instances, match, all]
        default: match
      match:
        description:
          - Programs that count as servers. Empty means the default list.
        type: list
        elements: raw
        default: []
      units:
        description:
          - Units to stop.
        type: list
        elements: str
        default: []
      expected_count:
        description:
          - How many GPUs the machine must have for M(cleanslate.inference.gpu_free). The default is as many as it has
            nodes.
        type: int
      memory_threshold:
        description:
          - Memory of a GPU that may be in use while it counts as free.
        type: str
        default: 128MiB
      memory_baseline:
        description:
          - What an idle GPU shows, for drivers that do not tell their own reserve.
        type: str
extends_documentation_fragment:
  - cleanslate.inference.declaration
  - cleanslate.inference.scan
  - cleanslate.inference.paths
  - cleanslate.inference.lease
attributes:
  check_mode:
    support: full
    description: In check mode neither a lease is taken nor an answer of SGLang kept.
  diff_mode:
    support: full
    description: Shows what differs from the record, secrets hidden.
  idempotent:
    support: full
    description: Changes nothing.
notes:
  - O(devices) is not used; the GPUs are those of O(declaration.gpus).
"""

EXAMPLES = r"""
- name: Say what would happen to the declared server
  cleanslate.inference.server_plan:
    instance: main
    declaration:
      model_path: /srv/models/llama-3.3-70b
      gpus: [0, 1, 2, 3]
      tp_size: 4
      nccl:
        ALGO: Ring
"""

RETURN = r"""
instance:
  description: Name of the server.
  returned: always
  type: str
converged:
  description: Whether there is nothing to do.
  returned: always
  type: bool
verdict:
  description: V(converged), V(reset), V(blocked) or V(unknown). The module fails with the last two.
  returned: always
  type: str
reasons:
  description: Why, each with C(code) and C(msg).
  returned: always
  type: list
  elements: dict
blocked:
  description: What must be mended first, each with C(code), C(msg) and the C(variable) to change.
  returned: always
  type: list
  elements: dict
notes:
  description: What is worth knowing and stops nothing.
  returned: always
  type: list
  elements: str
argv:
  description: The command line. It never holds a key.
  returned: always
  type: list
  elements: str
environment:
  description: What the declaration adds to the environment, secrets hidden.
  returned: always
  type: dict
nccl:
  description: NCCL's effective variables, each with C(value) and the variable that it comes C(from).
  returned: always
  type: dict
changes:
  description: What differs from the recorded launch, each with C(key), C(before) and C(after), secrets hidden.
  returned: always
  type: list
  elements: dict
resolved:
  description: SGLang's own resolved arguments, null when it was not asked or refused.
  returned: always
  type: dict
teardown:
  description: What a reset would end (C(targets), C(units)) and what it would spare (C(spared)).
  returned: always
  type: dict
gpus:
  description: GPUs of the server.
  returned: always
  type: list
  elements: dict
devices:
  description: GPUs that a reset touches, by UUID. Those of the declaration and those of the recorded server.
  returned: always
  type: list
  elements: str
ports:
  description: Ports that a reset needs.
  returned: always
  type: list
  elements: int
python:
  description: The Python that has SGLang.
  returned: always
  type: str
sglang_version:
  description: Version of SGLang.
  returned: always
  type: str
simulated:
  description: Whether plain files stood for GPUs.
  returned: always
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
from ansible_collections.cleanslate.inference.plugins.module_utils.sglang.run import plan_server

ARGUMENT_SPEC: dict[str, Any] = dict(
    SCAN_SPEC,
    **LEASE_SPEC,
    **PATHS_SPEC,
    instance={"type": "str", "required": True},
    declaration={"type": "dict", "required": True, "options": DECLARATION_SPEC},
    reset={"type": "str", "choices": ["auto", "always"], "default": "auto"},
    assume_ended={"type": "list", "elements": "dict", "default": []},
    release_lease={"type": "bool", "default": False},
    teardown={
        "type": "dict",
        "default": {},
        "options": {
            "scope": {"type": "str", "choices": ["instances", "match", "all"], "default": "match"},
            "match": {"type": "list", "elements": "raw", "default": []},
            "units": {"type": "list", "elements": "str", "default": []},
            "expected_count": {"type": "int"},
            "memory_threshold": {"type": "str", "default": "128MiB"},
            "memory_baseline": {"type": "str"},
        },
    },
)


def main() -> NoReturn:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    try:
        declaration = Declaration.from_params(module.params["instance"], module.params["declaration"])
        module.no_log_values.update(declaration.secrets())
        result = plan_server(declaration, module.params, module.check_mode)
    except CleanslateError as error:
        module.fail_json(msg=error.message, instance=module.params["instance"], **error.details)
    if result["verdict"] in ("blocked", "unknown"):
        module.fail_json(**result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
