#!/usr/bin/python
# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: pct_exec
short_description: Start or stop containers of a Proxmox VE node, and run commands in them
version_added: 1.0.0
author:
  - Contributors to the cleanslate.inference collection (!UNKNOWN)
description:
  - Runs on the hypervisor and does a whole list of containers in one connection. It is what a line like
    C(pct exec 129 -- bash -c "...") in a shell becomes.
  - Each container is brought into its state, with waits that look at the state and end at a deadline, and then runs its
    commands in order. A command that fails ends what is left to do in its container; the other containers are still
    done, and the task fails at its end.
  - Words arrive in the container as they are, whatever they hold; no shell reads them. Commands run as root of the
    container, in its home directory, with nothing of the hypervisor's environment.
  - For modules in a container see P(cleanslate.inference.pct#connection).
options:
  containers:
    description:
      - The containers, in order. An entry is an id, or a dictionary with C(vmid) and, in place of the options of the
        same names, C(state) and C(commands). A container may be named more than once.
    type: list
    elements: raw
    required: true
  state:
    description:
      - State of containers that have none of their own. V(running) starts what is stopped. V(stopped) shuts down, and
        runs no commands. V(restarted) shuts down and starts. V(unchanged) does neither, and commands need a container
        that runs.
    type: str
    choices: [running, stopped, restarted, unchanged]
    default: running
  commands:
    description:
      - What containers run that have no C(commands) of their own. An entry is a list of words, or a dictionary.
      - Its keys are C(argv), the words; C(creates) and C(removes), a path in the container that makes the command
        needless when it is there, or when it is not (a path, no pattern); C(changed_when), a truth value, or an
        expression over C(rc), C(stdout), C(stderr), C(stdout_lines) and C(vmid), true when the command changed
        something (default V(true)); C(ok_codes), exit codes that are no failure (default V([0])); C(chdir), the folder
        to run in; C(stdin), what it reads (nothing by default); C(timeout), in place of O(timeout).
      - Environment variables are given by C(env), as in C([env, NAME=value, program]). What is secret belongs into
        C(stdin), since words are seen by every user of the hypervisor and of the container.
    type: list
    elements: raw
    default: []
  timeout:
    description: Seconds that one command may take. Then it is ended, and all that it started.
    type: float
    default: 600.0
  wait_for:
    description:
      - When a started container is there. V(booted) waits until systemd in it has started its services; of containers
        without systemd until they accept commands. V(running) until it runs.
    type: str
    choices: [booted, running]
    default: booted
  start_timeout:
    description: Seconds that a start may take.
    type: float
    default: 60.0
  stop_timeout:
    description: Seconds that a container may take to shut down.
    type: float
    default: 60.0
  force_stop:
    description: Whether a container that does not shut down in time is ended by force.
    type: bool
    default: false
  lock_timeout:
    description:
      - Seconds to wait for the end of a lock (a backup, a migration) before a start or stop. Commands in a locked
        container that runs do not wait.
    type: float
    default: 0.0
  elsewhere:
    description:
      - What a container on another node of the cluster is. V(fail) names that node. V(skip) passes it over, so that the
        same list can be given to all nodes.
    type: str
    choices: [fail, skip]
    default: fail
attributes:
  check_mode:
    description:
      - Says what would be started, stopped and run. In containers that run, C(creates) and C(removes) are looked at.
    support: full
  diff_mode:
    description: Shows the state before and after, and the commands.
    support: full
  idempotent:
    description: States are; a command is when C(creates), C(removes) or C(changed_when) say so.
    support: partial
requirements:
  - Proxmox VE 8 or 9
  - Python 3.9 or later and Linux 5.3 or later on the hypervisor
  - root
seealso:
  - plugin: cleanslate.inference.pct
    plugin_type: connection
"""

EXAMPLES = r"""
- name: See what holds memory in two containers
  cleanslate.inference.pct_exec:
    containers: [129, 130]
    state: unchanged
    commands:
      - argv: [free, -m]
        changed_when: false

- name: Install the driver's libraries once, then let the service read its configuration
  cleanslate.inference.pct_exec:
    containers:
      - vmid: 129
        commands:
          - argv: [sh, /root/NVIDIA-Linux-x86_64-580.159.04.run, --no-kernel-module, --silent]
            creates: /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.580.159.04
            timeout: 900
          - argv: [systemctl, reload-or-restart, sglang]
            changed_when: false
      - {vmid: 131, state: stopped}

- name: On every node of a cluster, restart those of these containers that it has
  cleanslate.inference.pct_exec:
    containers: [129, 130, 131]
    state: restarted
    elsewhere: skip
"""

RETURN = r"""
containers:
  description:
    - One row for each entry of O(containers), in order.
    - C(code) of a failure is V(missing), V(elsewhere), V(not_a_container), V(template), V(locked), V(not_running),
      V(missing_device), V(start_failed), V(start_timeout), V(stop_failed), V(no_shell), V(no_folder),
      V(command_failed), V(command_timeout), V(not_root) or V(error).
    - C(reason) of a command that was not run is V(creates), V(removes) or V(check_mode).
  returned: always
  type: list
  elements: dict
  sample:
    - vmid: 129
      name: llm
      node: pve1
      status_before: stopped
      status: running
      state_changed: true
      changed: true
      failed: false
      skipped: false
      code: ""
      msg: ""
      seconds: 4.2
      commands:
        - index: 0
          cmd: systemctl is-active sglang
          changed: false
          skipped: false
          reason: ""
          failed: false
          rc: 0
          stdout: "active\n"
          stderr: ""
          truncated: false
          seconds: 0.5
"""

from typing import Any, NoReturn

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.pct.enter import Machine
from ansible_collections.cleanslate.inference.plugins.module_utils.pct.execute import Executor, Options
from ansible_collections.cleanslate.inference.plugins.module_utils.pct.wanted import read_wanted
from ansible_collections.cleanslate.inference.plugins.module_utils.teardown.reader import Reader

ARGUMENT_SPEC: dict[str, Any] = {
    "containers": {"type": "list", "elements": "raw", "required": True},
    "state": {"type": "str", "choices": ["running", "stopped", "restarted", "unchanged"], "default": "running"},
    "commands": {"type": "list", "elements": "raw", "default": []},
    "timeout": {"type": "float", "default": 600.0},
    "wait_for": {"type": "str", "choices": ["booted", "running"], "default": "booted"},
    "start_timeout": {"type": "float", "default": 60.0},
    "stop_timeout": {"type": "float", "default": 60.0},
    "force_stop": {"type": "bool", "default": False},
    "lock_timeout": {"type": "float", "default": 0.0},
    "elsewhere": {"type": "str", "choices": ["fail", "skip"], "default": "fail"},
}
_OPTIONS = ("start_timeout", "stop_timeout", "lock_timeout", "force_stop", "wait_for", "elsewhere")


def main() -> NoReturn:
    module = AnsibleModule(argument_spec=ARGUMENT_SPEC, supports_check_mode=True)
    reader = Reader()
    try:
        wanted = read_wanted(module.params)
        options = Options(**{name: module.params[name] for name in _OPTIONS})
        result = Executor(Machine(), options, reader, module.check_mode).run(wanted)
    except CleanslateError as error:
        module.fail_json(msg=error.message, **error.details)
    if not module._diff:
        del result["diff"]
    if result.pop("failed"):
        module.fail_json(**result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
