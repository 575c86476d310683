# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: server_instances
short_description: Complete a list of declared servers
version_added: 1.0.0
author:
  - Contributors to the cleanslate.inference collection (!UNKNOWN)
description:
  - Fills each entry of a list of servers with defaults, and makes one server of them alone when the list is empty.
  - Refuses two servers of the same name, on the same port, or on the same GPU, and one without GPUs beside others.
  - The dictionaries C(nccl), C(nccl_host), C(environment) and C(args) are merged by key, the entry's value wins, null
    takes a key away. Everything else, C(speculative) included, is replaced as a whole.
options:
  _input:
    description: The servers. Each has a C(name) and fields of the option C(declaration) of
      M(cleanslate.inference.server_plan).
    type: list
    elements: dict
    required: true
  defaults:
    description: The fields that an entry does not have, C(name) included.
    type: dict
    required: true
"""

EXAMPLES = r"""
- name: Show two servers that differ in their GPUs and ports
  ansible.builtin.debug:
    msg: "{{ [{'name': 'a', 'gpus': [0]}, {'name': 'b', 'gpus': [1], 'port': 30001}]
             | cleanslate.inference.server_instances({'name': 'main', 'model_path': '/srv/m'}) }}"
"""

RETURN = r"""
_value:
  description: The servers, each with C(name) and C(declaration).
  type: list
  elements: dict
"""

import difflib
import typing as t

from ansible.errors import AnsibleFilterError

from ansible_collections.cleanslate.inference.plugins.module_utils.sglang.declaration import DECLARATION_SPEC

MERGED = ("nccl", "nccl_host", "environment", "args")


def merge(entry: t.Mapping[str, t.Any], defaults: t.Mapping[str, t.Any]) -> dict[str, t.Any]:
    """One complete server."""
    values = dict(defaults)
    for key, value in entry.items():
        if key != "name" and key not in DECLARATION_SPEC:
            near = difflib.get_close_matches(str(key), ["name", *DECLARATION_SPEC], 1)
            hint = " Did you mean %s?" % near[0] if near else ""
            raise AnsibleFilterError(
                "sglang_server_instances: %s is no field of a server. Arguments of SGLang without a variable of their "
                "own go into args.%s" % (key, hint)
            )
        if key in MERGED and isinstance(value, t.Mapping):
            both = {**(defaults.get(key) or {}), **value}
            # In nccl_host null has a meaning of its own: it takes a variable of nccl away.
            values[key] = both if key == "nccl_host" else {k: v for k, v in both.items() if v is not None}
        else:
            values[key] = value
    name = values.pop("name", None)
    if not name:
        raise AnsibleFilterError("sglang_server_instances: an entry has no name.")
    return {"name": str(name), "declaration": {k: v for k, v in values.items() if v is not None}}


def server_instances(entries: t.Any, defaults: t.Any) -> list[dict[str, t.Any]]:
    """All servers. Raises AnsibleFilterError on unknown fields and on what two of them may not share."""
    if not isinstance(entries, (list, tuple)) or not isinstance(defaults, t.Mapping):
        raise AnsibleFilterError("sglang_server_instances: a list of servers is needed.")
    out = [merge(entry, defaults) for entry in (entries or [{}])]
    gpus = [[str(gpu).strip().lower() for gpu in server["declaration"].get("gpus") or []] for server in out]
    if len(out) > 1 and not all(gpus):
        lacking = ", ".join(server["name"] for server, own in zip(out, gpus, strict=True) if not own)
        raise AnsibleFilterError(
            "sglang_server_instances: with several servers each needs gpus of its own, since none means all; missing "
            "in %s." % lacking
        )
    for what, values in (
        ("name", [server["name"] for server in out]),
        ("port", [str(server["declaration"].get("port")) for server in out]),
        # One that names a GPU twice is the plan's matter.
        ("GPU", [gpu for own in gpus for gpu in sorted(set(own))]),
    ):
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice:
            raise AnsibleFilterError("sglang_server_instances: %s %s is declared twice." % (what, ", ".join(twice)))
    return out


class FilterModule:
    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {"server_instances": server_instances}
