# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The lab's inventory for Ansible, written anew for each fleet."""

from __future__ import annotations

import json
from pathlib import Path

from .fleet import Hypervisor
from .place import CHECKOUT, Place, quoted

HEAD = "# Written by `tests/lab/lab inventory` for the fleet that is up; its ssh enters the lab's network by itself.\n"

# A server for each guest: the stand-in, or the real SGLang where a guest has it, under the same path.
SERVER = {
    "sglang_server_name": "main",
    "sglang_server_python": "/opt/sglang/bin/python",
    "sglang_server_model_path": "/opt/sglang/models/tiny",
    "sglang_server_gpus": "{{ range(lab_gpus | length) | list }}",  # as NVML counts them in the guest
    "sglang_server_tp_size": "{{ lab_gpus | length }}",
    "sglang_server_args": {"load_format": "dummy"},
    "sglang_server_nccl": {"ALGO": "allreduce:ring", "BUFFSIZE": 8388608},
}
# What the real one needs to run on a CPU with random weights, on one GPU's node.
REAL_SERVER = {
    "sglang_server_gpus": [0],
    "sglang_server_tp_size": 1,
    "sglang_server_mem_fraction_static": 0.3,
    "sglang_server_args": {
        "device": "cpu",
        "load_format": "dummy",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "max_total_tokens": 4096,
        "max_running_requests": 8,
    },
}


def inventory(place: Place, fleet: list[Hypervisor]) -> dict:
    """Groups `hypervisors`, `gpu_nodes` (guests that run), and one for each kind: `lab_privileged`, `lab_stopped`, …"""
    ssh = f"-o UserKnownHostsFile={quoted(place.known_hosts)} -o IdentitiesOnly=yes"
    groups: dict[str, dict] = {
        "hypervisors": {"hosts": {host.name: {"ansible_host": host.address} for host in fleet}},
        "guests": {"vars": {"ansible_connection": "cleanslate.inference.pct"}, "hosts": {}},
        "gpu_nodes": {"vars": SERVER, "hosts": {}},
    }
    for host in fleet:
        for guest in host.guests:
            groups["guests"]["hosts"][guest.name] = {
                "ansible_pct_vmid": guest.vmid,
                "ansible_pct_host": host.address,
                "lab_hypervisor": host.name,
                "lab_kind": guest.kind,
                "lab_gpus": list(guest.gpus),
                "lab_address": guest.address,
            }
            groups.setdefault(f"lab_{guest.kind}", {"hosts": {}})["hosts"][guest.name] = {}
            if guest.starts:
                groups["gpu_nodes"]["hosts"][guest.name] = {}
            if guest.sglang:
                groups.setdefault("lab_sglang", {"vars": REAL_SERVER, "hosts": {}})["hosts"][guest.name] = {}
    shared = {
        "ansible_user": "root",
        "ansible_ssh_private_key_file": str(place.key),
        "ansible_ssh_executable": str(place.ssh_wrapper),
        "ansible_ssh_common_args": shell_quoted(ssh),
        # Labs have the same addresses: a multiplexed connection must not lead into another one.
        "ansible_control_path_dir": place.control_path_dir,
        "ansible_python_interpreter": "/usr/bin/python3",
    }
    return {"all": {"vars": shared, "children": groups}}


def shell_quoted(options: str) -> str:
    """Ansible splits the options like a shell, ssh then splits the value again: the double quotes have to survive."""
    return options.replace('="', "='\"").replace('" ', "\"' ")


def folder(place: Place) -> Path:
    """inventories/lab for the checkout's own lab; one elsewhere (CLEANSLATE_LAB_DIR) keeps its inventory to itself."""
    own = place.folder == (CHECKOUT / "build" / "lab").resolve()
    return CHECKOUT / "inventories" / "lab" if own else place.folder / "inventory"


def write(place: Place, fleet: list[Hypervisor]) -> Path:
    path = folder(place) / "hosts.yml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEAD + "---\n" + yaml_of(inventory(place, fleet)), encoding="utf-8")
    return path


def yaml_of(value: dict, indent: int = 0) -> str:
    """Nested dictionaries as YAML; leaves as JSON, which YAML reads."""
    lines = ""
    for key, item in value.items():
        lines += " " * indent + f"{key}:"
        lines += "\n" + yaml_of(item, indent + 2) if isinstance(item, dict) and item else f" {json.dumps(item)}\n"
    return lines
