# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: run_id
short_description: One id for one run of a playbook
version_added: 1.0.0
author:
  - Contributors to the cleanslate.inference collection (!UNKNOWN)
description:
  - Names the run that is under way, for people (who, where) and for machines (which process, started when).
  - It is the same wherever in the run it is asked for, and differs from run to run.
  - Use it for the option C(lease) of the modules of this collection.
options:
  _terms:
    description: None.
"""

EXAMPLES = r"""
- name: Show the id of this run
  ansible.builtin.debug:
    msg: "{{ lookup('cleanslate.inference.run_id') }}"
"""

RETURN = r"""
_raw:
  description: The id, C(user@control-node:pid-start).
  type: list
  elements: str
"""

import getpass
import multiprocessing
import os
import socket
import typing as t

from ansible.plugins.lookup import LookupBase


def start_of(pid: int) -> str:
    """When a process started: in clock ticks since boot, where the system says so."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as handle:
            stat = handle.read()
    except OSError:
        return os.environ.get("ANSIBLE_RUN_START", "0")
    return stat[stat.rindex(b")") + 2 :].split()[19].decode("ascii")


def main_pid() -> int:
    """The process of the whole run: tasks are worked on by its forks."""
    parent = multiprocessing.parent_process()
    return int(parent.pid) if parent is not None and parent.pid else os.getpid()


def run_id() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    pid = main_pid()
    return "%s@%s:%d-%s" % (user, socket.gethostname(), pid, start_of(pid))


class LookupModule(LookupBase):
    def run(self, terms: t.Any, variables: t.Any = None, **kwargs: t.Any) -> list[str]:
        return [run_id()]
