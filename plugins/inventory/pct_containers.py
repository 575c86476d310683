# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The inventory plugin; what the files of a cluster mean is module_utils/pct/cluster.py."""

from __future__ import annotations

DOCUMENTATION = r"""
name: pct_containers
short_description: All containers of a Proxmox VE cluster, by one ssh to any of its nodes
version_added: 1.0.0
author:
  - Contributors to the cleanslate.inference collection (!UNKNOWN)
description:
  - Reads the configurations of all LXC containers of a cluster from the files that every node has, in one command over
    one ssh connection. Needs no API token and nothing on the node but a login that may read C(/etc/pve).
  - The file's name must be, or end in, C(pct_containers.yml) or C(.pct.yml) (or C(.yaml)).
  - A host's name is the container's name and its id, C(llm-129), so that no two containers can become one host. A
    container without a name is called as Proxmox VE calls it, C(CT129-129).
  - Snapshots and pending changes are left out. Templates are, unless O(templates).
  - Each host gets what the connection P(cleanslate.inference.pct#connection) needs (C(ansible_connection),
    C(ansible_pct_host), C(ansible_pct_vmid), and what O(user), O(sudo), O(port), O(private_key_file) and O(ssh_args)
    say), and C(pct_vmid), C(pct_name), C(pct_node), C(pct_status), C(pct_pool), C(pct_tags), C(pct_lock),
    C(pct_unprivileged), C(pct_template), C(pct_ostype), C(pct_onboot), C(gpu_minors) (N of each C(/dev/nvidiaN) that it
    is given, which is not NVML's index), C(gpu_devices) (all paths below C(/dev) that it is given) and
    C(gpu_shared_with) (ids of containers of its node that are given one of the same GPUs, running or not).
  - Groups, each with O(group_prefix) before it, are C(all) containers, C(node_NAME), C(pool_NAME), C(tag_NAME),
    C(status_running), C(status_stopped), C(status_unknown), C(gpu) (those with a GPU), C(gpu_NODE_N) (those with
    C(/dev/nvidiaN) of that node) and C(gpu_shared).
extends_documentation_fragment:
  - ansible.builtin.constructed
  - ansible.builtin.inventory_cache
notes:
  - C(pct_status) of containers on the node that was asked is certain. Of others it is what their node told the cluster
    last, at most some ten seconds ago; V(unknown) where it did not.
  - A container that is being migrated in the very moment of the reading may need a second one, which is made.
requirements:
  - OpenSSH client on the control node
options:
  plugin:
    description: Marks the file as one of this plugin's.
    type: str
    required: true
    choices: [cleanslate.inference.pct_containers]
  hosts:
    description:
      - Nodes of the cluster as ssh reaches them. They are asked in this order until one answers.
    type: list
    elements: str
    required: true
  user:
    description:
      - User to log in with. When unset, ssh chooses.
    type: str
    env:
      - name: CLEANSLATE_PCT_USER
  sudo:
    description:
      - Read by C(sudo -n). When unset, it is done for every O(user) but root.
    type: bool
  port:
    description: Port of the nodes' ssh servers. When unset, ssh chooses.
    type: int
  private_key_file:
    description: Key to log in with. When unset, ssh chooses.
    type: path
  ssh_executable:
    description: The ssh to use.
    type: str
    default: ssh
    ini:
      - section: ssh_connection
        key: ssh_executable
    env:
      - name: ANSIBLE_SSH_EXECUTABLE
  ssh_args:
    description:
      - Options for ssh, for example C(-o ProxyJump=gate), as a shell would take them.
    type: str
    default: ""
    ini:
      - section: ssh_connection
        key: ssh_common_args
    env:
      - name: ANSIBLE_SSH_COMMON_ARGS
  timeout:
    description: Seconds that one node may take, from the connection to the last line.
    type: float
    default: 30.0
  node_addresses:
    description:
      - Node -> address, how the control node reaches the node. It goes before all other sources.
      - Without an entry the node that was asked has the address under which it was asked, any other node the one that
        the cluster has of it, else its name.
    type: dict
    default: {}
  hypervisors:
    description:
      - Whether the nodes themselves are hosts too, under their own names, in a group C(hypervisors).
    type: bool
    default: false
  templates:
    description: Whether templates are hosts too. They never run.
    type: bool
    default: false
  name_prefix:
    description:
      - Put before each container's host name. Two clusters in one inventory may have the same name and id; give each
        cluster's file a prefix then.
    type: str
    default: ""
  group_prefix:
    description: Put before the names of all groups.
    type: str
    default: pct_
"""

EXAMPLES = r"""
# cluster.pct.yml: all containers; those with a GPU that run as gpu_nodes; the nodes as hypervisors
plugin: cleanslate.inference.pct_containers
hosts: [pve1.example.net, pve2.example.net]
user: ops
sudo: true
# how the control node reaches the nodes, where the cluster's own addresses do not do
node_addresses:
  pve1: pve1.example.net
  pve2: pve2.example.net
hypervisors: true
groups:
  gpu_nodes: gpu_minors | length > 0 and pct_status == 'running'
keyed_groups:
  - {key: pct_ostype, prefix: os}
compose:
  ansible_python_interpreter: "'/usr/bin/python3'"
cache: true
cache_plugin: ansible.builtin.jsonfile
cache_connection: ~/.cache/cleanslate-inventory
cache_timeout: 300
"""

import re
import shlex
import subprocess
import typing as t

from ansible.errors import AnsibleError, AnsibleParserError
from ansible.module_utils.common.text.converters import to_native
from ansible.plugins.inventory import BaseInventoryPlugin, Cacheable, Constructable
from ansible.utils.display import Display

from ansible_collections.cleanslate.inference.plugins.module_utils.common.text import show
from ansible_collections.cleanslate.inference.plugins.module_utils.pct.cluster import (
    NO_PVE,
    READ,
    Cluster,
    Guest,
    parse_reading,
)

display = Display()

ENDINGS = ("pct_containers.yml", "pct_containers.yaml", ".pct.yml", ".pct.yaml")


class NodeProblem(Exception):
    """Why one node could not be read; another one may be."""


class InventoryModule(BaseInventoryPlugin, Constructable, Cacheable):
    NAME = "cleanslate.inference.pct_containers"

    def verify_file(self, path: str) -> bool:
        """Whether the file's name says that it is one of ours."""
        return bool(super().verify_file(path)) and path.endswith(ENDINGS)

    def parse(self, inventory: t.Any, loader: t.Any, path: str, cache: bool = True) -> None:
        super().parse(inventory, loader, path)
        self._read_config_data(path)
        if not self.get_option("hosts"):
            raise AnsibleParserError(f"{path}: hosts: name at least one node of the cluster, as ssh reaches it.")
        for host, reading in self._cached(path, cache):
            self._populate(parse_reading(reading), host)

    # -- reading -----------------------------------------------------------------------------------------------------

    def _cached(self, path: str, cache: bool) -> list[list[str]]:
        """The node that was asked and its reading; from the cache where there is one, which keeps it as it was read."""
        key = self.get_cache_key(path)
        use, renew = self.get_option("cache") and cache, self.get_option("cache") and not cache
        if use:
            try:
                return [self._cache[key]]
            except KeyError:
                renew = True
        found = self._read()
        if renew:
            self._cache[key] = found
        return [found]

    def _read(self) -> list[str]:
        problems = []
        for host in self.get_option("hosts"):
            try:
                reading, moving = self._ask(host)
                if moving or parse_reading(reading).doubtful:
                    reading, moving = self._ask(host)
            except NodeProblem as problem:
                problems.append(f"{host}: {problem}")
                continue
            for line in problems:
                display.warning(f"pct_containers: {line}")
            if moving:
                display.warning(f"pct_containers: {host}: not read, and so left out: {show(moving)}")
            return [host, reading]
        raise AnsibleParserError("no node of the cluster could be read:\n  " + "\n  ".join(problems))

    def _command(self, host: str) -> list[str]:
        user, sudo = self.get_option("user"), self.get_option("sudo")
        if sudo is None:
            sudo = user not in (None, "root")
        words = [self.get_option("ssh_executable"), "-T", "-o", "BatchMode=yes"]
        # Rounded up: ssh takes whole seconds, and 0 would be for ever.
        words += ["-o", f"ConnectTimeout={max(1, round(self.get_option('timeout')))}"]
        if user:
            words += ["-o", f"User={user}"]
        if self.get_option("port"):
            words += ["-o", f"Port={self.get_option('port')}"]
        if self.get_option("private_key_file"):
            words += ["-i", self.get_option("private_key_file")]
        words += shlex.split(self.get_option("ssh_args"))
        remote = [*(["sudo", "-n"] if sudo else []), "sh", "-c", READ]
        return [*words, "--", host, shlex.join(remote)]

    def _ask(self, host: str) -> tuple[str, str]:
        """One reading, and what vanished while it was made. Raises NodeProblem."""
        try:
            done = subprocess.run(
                self._command(host),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                timeout=self.get_option("timeout"),
            )
        except OSError as error:
            raise AnsibleError(f"{self.get_option('ssh_executable')}: {error.strerror}") from error
        except subprocess.TimeoutExpired:
            raise NodeProblem(f"did not answer within {self.get_option('timeout'):g} s (option timeout)") from None
        said = done.stderr.decode("utf-8", "replace").strip()
        _refuse(done.returncode, said)
        vanished = re.findall(r"(?m)^grep: (/etc/pve/nodes/[^*\s]+\.conf): No such file", said)
        return done.stdout.decode("utf-8", "replace"), " ".join(vanished)

    # -- hosts and groups --------------------------------------------------------------------------------------------

    def _populate(self, cluster: Cluster, asked: str) -> None:
        for vmid, nodes in cluster.doubtful.items():
            raise AnsibleParserError(f"container {vmid} is on {' and on '.join(nodes)}: ids are unique in a cluster.")
        prefix = self.get_option("group_prefix")
        addresses = self._addresses(cluster, asked)
        everybody = self._group(prefix + "all")
        if self.get_option("hypervisors"):
            group = self._group("hypervisors")
            for node, address in addresses.items():
                self.inventory.add_host(node, group=group)
                self.inventory.set_variable(node, "ansible_host", address)
                self.inventory.set_variable(node, "pct_node", node)
                for name, value in self._login("ansible_user").items():
                    self.inventory.set_variable(node, name, value)
        for guest in cluster.guests:
            if guest.conf.template and not self.get_option("templates"):
                continue
            host = self.get_option("name_prefix") + host_name(guest)
            self.inventory.add_host(host, group=everybody)
            for group in groups_of(guest):
                self.inventory.add_child(self._group(prefix + group), host)
            variables = {**variables_of(guest), **self._way(guest, addresses[guest.node])}
            for name, value in variables.items():
                self.inventory.set_variable(host, name, value)
            strict = self.get_option("strict")
            self._set_composite_vars(self.get_option("compose"), variables, host, strict=strict)
            self._add_host_to_composed_groups(self.get_option("groups"), variables, host, strict=strict)
            self._add_host_to_keyed_groups(self.get_option("keyed_groups"), variables, host, strict=strict)

    def _group(self, name: str) -> str:
        return self.inventory.add_group(self._sanitize_group_name(name))

    def _addresses(self, cluster: Cluster, asked: str) -> dict[str, str]:
        given = self.get_option("node_addresses")
        for name in sorted(set(given) - set(cluster.nodes)):
            display.warning(f"pct_containers: node_addresses: the cluster of {asked} has no node {name}")
        return {
            name: str(given.get(name) or (asked if node.local else node.address or name))
            for name, node in cluster.nodes.items()
        }

    def _way(self, guest: Guest, address: str) -> dict[str, t.Any]:
        """How the connection gets into the container."""
        way: dict[str, t.Any] = {
            "ansible_connection": "cleanslate.inference.pct",
            "ansible_pct_host": address,
            "ansible_pct_vmid": guest.vmid,
            **self._login("ansible_pct_user"),
        }
        if self.get_option("sudo") is not None:
            way["ansible_pct_sudo"] = self.get_option("sudo")
        return way

    def _login(self, user: str) -> dict[str, t.Any]:
        """What was said about the way to the nodes, as variables for connections; nothing that was not said."""
        said = {
            user: self.get_option("user"),
            "ansible_port": self.get_option("port"),
            "ansible_ssh_private_key_file": self.get_option("private_key_file"),
            "ansible_ssh_common_args": self.get_option("ssh_args"),
        }
        return {name: value for name, value in said.items() if value}


def _refuse(returncode: int, said: str) -> None:
    """Raise NodeProblem when a reading is none."""
    if NO_PVE in said:
        raise NodeProblem("has no /etc/pve/nodes: it is no Proxmox VE node, or its cluster file system is down")
    if returncode == 255:
        raise NodeProblem(f"ssh failed: {show(said) or 'it said nothing'}")
    if re.search(r"(?m)^sudo: ", said):
        raise NodeProblem(f"sudo -n on the node refuses: {show(said)}. Allow it, or log in as root (option user)")
    if re.search(r"(?m)^grep: /etc/pve/.*: Permission denied", said):
        raise NodeProblem("the login may not read /etc/pve: log in as root (option user), or set sudo: true")
    # 0: all was read. 2: some file was not there, which is all right for all but configurations.
    if returncode not in (0, 2):
        raise NodeProblem(f"the reading ended with {returncode}: {show(said) or 'it said nothing'}")


def host_name(guest: Guest) -> str:
    """Unique in the cluster, since the id is. What a host name cannot hold becomes an underscore."""
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', to_native(guest.name))}-{guest.vmid}"


def groups_of(guest: Guest) -> list[str]:
    """Names of its groups, without the prefix."""
    groups = [f"node_{guest.node}", f"status_{guest.status}", *(f"tag_{tag}" for tag in guest.conf.tags)]
    if guest.pool:
        groups.append(f"pool_{guest.pool}")
    if guest.gpus:
        groups += ["gpu", *(f"gpu_{guest.node}_{gpu}" for gpu in guest.gpus)]
    if guest.shared_with:
        groups.append("gpu_shared")
    return groups


def variables_of(guest: Guest) -> dict[str, t.Any]:
    """What is known of a container."""
    conf = guest.conf
    return {
        "pct_vmid": guest.vmid,
        "pct_name": show(guest.name),
        "pct_node": guest.node,
        "pct_status": guest.status,
        "pct_pool": show(guest.pool),
        "pct_tags": [show(tag) for tag in conf.tags],
        "pct_lock": show(conf.lock),
        "pct_unprivileged": conf.unprivileged,
        "pct_template": conf.template,
        "pct_ostype": show(conf.keys.get("ostype", "")),
        "pct_onboot": conf.keys.get("onboot") == "1",
        "gpu_minors": list(guest.gpus),
        "gpu_devices": [show(path) for path in guest.devices],
        "gpu_shared_with": list(guest.shared_with),
    }
