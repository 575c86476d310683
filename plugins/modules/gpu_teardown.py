#!/usr/bin/python
# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_teardown
short_description: End exactly the processes that hold GPUs and were asked for
version_added: 1.0.0
author:
  - Contributors to the cleanslate.inference collection (!UNKNOWN)
description:
  - Plans who is to be ended and who is spared, each with its reason, stops units through systemd, and ends the rest by
    TERM and, where needed, KILL.
  - Nothing is matched by a part of a name. Daemons of the driver, monitoring tools and display servers are always
    spared, and so are this module itself, whatever started it, and process 1.
  - A process is its pid and its start time; a successor with the same pid gets no signal.
  - Whether the GPUs are free afterwards is judged by M(cleanslate.inference.gpu_free).
options:
  scope:
    description:
      - V(instances) ends the named instances and units only.
      - V(match) ends those, and processes that match O(match) and hold one of the chosen GPUs, with their relatives.
      - V(all) ends those, and every unprotected holder of the chosen GPUs.
      - The other selectors, O(devices), O(users) and O(containers), confine every scope.
    type: str
    choices: [instances, match, all]
    required: true
  instances:
    description:
      - Names of instances that were launched by M(cleanslate.inference.server_launch).
      - Other instances are spared, whatever they match; under O(scope=all) those that hold none of the chosen GPUs.
      - From a hypervisor, with O(containers), the instances of those containers are meant.
      - An instance that runs on none of O(devices) is spared.
    type: list
    elements: str
    default: []
  units:
    description:
      - Names of systemd units to be stopped, with all their processes.
    type: list
    elements: str
    default: []
  match:
    description:
      - Which programs are meant. Each entry is a dictionary with exactly one of C(module) (a Python interpreter that
        runs this module), C(script) (one that runs this script), both optionally with C(args) that must follow, C(exe)
        (the full path of a program that is no interpreter), or C(title) (what the process calls itself, alone or
        followed by C(_TPn), C(_DPn), C(_PPn), C(_EPn)). A plain string is a title.
      - A match that holds none of the GPUs is ended only if it is an ancestor or descendant of a target, or belongs to
        its process group whose leader is dead or a target.
      - Processes of Slurm, Kubernetes and Docker are spared under V(match) and named.
      - Empty means both launchers of SGLang and the titles that it gives its processes.
    type: list
    elements: raw
    default: []
  ports:
    description:
      - TCP ports that a server wants. Under O(scope=all) an unprotected listener is a target; otherwise only if it
        matches or belongs to a named instance, and else it is spared as C(port_busy).
    type: list
    elements: int
    default: []
  term_timeout:
    description:
      - Seconds between TERM and KILL. V(0) sends KILL at once.
    type: float
    default: 10.0
  kill_timeout:
    description:
      - Seconds from the first signal until the module gives up and fails.
    type: float
    default: 60.0
extends_documentation_fragment:
  - cleanslate.inference.scan
  - cleanslate.inference.lease
  - cleanslate.inference.paths
attributes:
  check_mode:
    description: Lists who would be ended, in RV(killed).
    support: full
  diff_mode:
    description: Shows the processes before and after.
    support: full
requirements:
  - Linux 5.3 or later
  - Python 3.9 or later
seealso:
  - module: cleanslate.inference.gpu_free
  - module: cleanslate.inference.runtime_residue
"""

EXAMPLES = r"""
- name: End the server main, and nothing else
  cleanslate.inference.gpu_teardown:
    scope: instances
    instances: [main]

- name: End what is left of SGLang on two GPUs
  cleanslate.inference.gpu_teardown:
    scope: match
    devices: ["0", "1"]
    ports: [30000]

- name: End every holder that is not protected
  cleanslate.inference.gpu_teardown:
    scope: all
    protect: [gpu-exporter]
"""

RETURN = r"""
killed:
  description:
    - Who was ended; in check mode, who would be.
    - C(signal) is the last one sent, C(unit) where systemd ended it with its unit, and empty where it went with
      another.
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
      unit: sglang-main.service
      container: ""
      guest_pid: 4711
      gpu_memory: 46013612032
      decision: ended
      reason: match
      signal: TERM
      seconds: 0.21
spared:
  description: Who holds a GPU, matches or listens, and was spared, with C(reason).
  returned: always
  type: list
  elements: dict
survivors:
  description: Who did not end, or came back.
  returned: always
  type: list
  elements: dict
stopped_units:
  description: Units that were stopped; in check mode, that would be.
  returned: always
  type: list
  elements: str
ports:
  description:
    - Who listens on O(ports). Connections in TIME_WAIT are counted; they keep nobody from listening who sets
      SO_REUSEADDR, which C(note) says.
  returned: always
  type: list
  elements: dict
reason:
  description: Why the module failed, V(unkillable) or V(respawned).
  returned: when something did not end
  type: str
elapsed:
  description: Seconds from the first step to the last exit.
  returned: always
  type: float
simulated:
  description: Whether O(dev_dir) is outside C(/dev), so that plain files stood for GPUs.
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
from ansible_collections.cleanslate.inference.plugins.module_utils.teardown.run import tear_down

ARGUMENT_SPEC: dict[str, Any] = dict(
    SCAN_SPEC,
    **LEASE_SPEC,
    **PATHS_SPEC,
    scope={"type": "str", "choices": ["instances", "match", "all"], "required": True},
    instances={"type": "list", "elements": "str", "default": []},
    units={"type": "list", "elements": "str", "default": []},
    match={"type": "list", "elements": "raw", "default": []},
    ports={"type": "list", "elements": "int", "default": []},
    term_timeout={"type": "float", "default": 10.0},
    kill_timeout={"type": "float", "default": 60.0},
)


def main() -> NoReturn:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    try:
        result = tear_down(module.params, module.check_mode)
    except CleanslateError as error:
        for warning in error.details.pop("warnings", ()):
            module.warn(warning)
        module.fail_json(msg=error.message, **error.details)
    for warning in result.pop("warnings"):
        module.warn(warning)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
