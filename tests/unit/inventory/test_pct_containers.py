# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The inventory plugin as Ansible uses it, with a script in place of ssh."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible import constants
from ansible.errors import AnsibleParserError
from ansible.inventory.data import InventoryData
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.doc_fragments import constructed, inventory_cache

from ansible_collections.cleanslate.inference.plugins.inventory import pct_containers

from ..pct.conftest import PVE, reading_of

NAME = "cleanslate.inference.pct_containers"

# Keeps the words of each call; answers as the files of the host's name say: what it prints, to stderr, its code.
SSH = """#!/bin/sh
{ printf '%s\\n' "$@"; echo; } >> "$RECORD/words"
for word do last=$word; [ "$before" = -- ] && host=$word; before=$word; done
echo "$host" >> "$RECORD/asked"
[ -e "$RECORD/$host.first" ] && { cat "$RECORD/$host.first" >&2; rm "$RECORD/$host.first"; exit 2; }
cat "$RECORD/$host.out"
[ -e "$RECORD/$host.err" ] && { tail -n +2 "$RECORD/$host.err" >&2; exit "$(head -n 1 "$RECORD/$host.err")"; }
exit 0
"""


class Nodes:
    """What the nodes answer, and what they were asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ssh = folder / "ssh"
        self.ssh.write_text(SSH, encoding="utf-8")
        self.ssh.chmod(0o755)

    def answer(self, host: str, out: str, code: int = 0, err: str = "") -> None:
        (self.folder / f"{host}.out").write_text(out, encoding="utf-8")
        if code or err:
            (self.folder / f"{host}.err").write_text(f"{code}\n{err}\n", encoding="utf-8")

    @property
    def asked(self) -> list[str]:
        path = self.folder / "asked"
        return path.read_text(encoding="utf-8").split() if path.exists() else []

    @property
    def words(self) -> list[str]:
        """Those of the last call."""
        return (self.folder / "words").read_text(encoding="utf-8").rstrip("\n").split("\n\n")[-1].split("\n")


@pytest.fixture(autouse=True, scope="module")
def _options() -> None:
    """What Ansible's plugin loader does with a plugin's documentation."""
    options: dict[str, Any] = {}
    for fragment in (constructed.ModuleDocFragment, inventory_cache.ModuleDocFragment, pct_containers):
        options.update(yaml.safe_load(fragment.DOCUMENTATION)["options"])
    constants.config.initialize_plugin_configuration_definitions("inventory", NAME, options)


def make() -> pct_containers.InventoryModule:
    plugin = pct_containers.InventoryModule()
    plugin._load_name = plugin._original_path = NAME
    return plugin


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    monkeypatch.setenv("RECORD", str(tmp_path))
    made = Nodes(tmp_path)
    made.answer("pve1", reading_of(PVE))
    return made


def read(nodes: Nodes, use_cache: bool = True, **options: Any) -> InventoryData:
    source = nodes.folder / "cluster.pct.yml"
    given = {"plugin": NAME, "hosts": ["pve1"], "ssh_executable": str(nodes.ssh), **options}
    source.write_text(yaml.safe_dump(given), encoding="utf-8")
    plugin, data = make(), InventoryData()
    assert plugin.verify_file(str(source))
    plugin.parse(data, DataLoader(), str(source), cache=use_cache)
    if plugin.get_option("cache"):
        plugin.update_cache_if_changed()
    data.reconcile_inventory()
    return data


def hosts(data: InventoryData, group: str) -> set[str]:
    return {host.name for host in data.groups[group].get_hosts()} if group in data.groups else set()


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("pct_containers.yml", True),
        ("my_pct_containers.yaml", True),
        ("cluster.pct.yml", True),
        ("cluster.pct.yaml", True),
        ("cluster.yml", False),
        ("pct.yml", False),
        ("cluster.proxmox.yml", False),
        ("cluster.pct.yml.bak", False),
    ],
)
def test_files(tmp_path: Path, name: str, ours: bool) -> None:
    (tmp_path / name).touch()
    assert make().verify_file(str(tmp_path / name)) is ours
    assert not make().verify_file(str(tmp_path / "nosuch" / name))


def test_names_cannot_meet(nodes: Nodes) -> None:
    """Two are called llm, one has no name; the template is left out."""
    assert set(read(nodes).hosts) == {"llm-129", "embed.example.net-130", "CT131-131", "llm-201", "far-301"}
    assert "golden-900" in read(nodes, templates=True).hosts
    assert set(read(nodes, name_prefix="gpu-").hosts) >= {"gpu-llm-129", "gpu-llm-201"}


def test_variables(nodes: Nodes) -> None:
    found = read(nodes).hosts["embed.example.net-130"].vars
    # The other two are Ansible's own.
    assert {name: value for name, value in found.items() if not name.startswith("inventory_")} == {
        "ansible_connection": "cleanslate.inference.pct",
        "ansible_pct_host": "pve1",
        "ansible_pct_vmid": 130,
        "gpu_devices": ["/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia2"],
        "gpu_minors": [1, 2],
        "gpu_shared_with": [129],
        "pct_lock": "backup",
        "pct_name": "embed.example.net",
        "pct_node": "pve1",
        "pct_onboot": False,
        "pct_ostype": "ubuntu",
        "pct_pool": "",
        "pct_status": "stopped",
        "pct_tags": [],
        "pct_template": False,
        "pct_unprivileged": True,
        "pct_vmid": 130,
    }


def test_groups(nodes: Nodes) -> None:
    data = read(nodes)
    assert hosts(data, "pct_all") == set(data.hosts)
    assert hosts(data, "pct_node_pve1") == {"llm-129", "embed.example.net-130", "CT131-131"}
    assert hosts(data, "pct_pool_prod") == {"llm-129", "llm-201"}
    assert hosts(data, "pct_pool_lab_small") == {"CT131-131"}
    assert hosts(data, "pct_tag_gpu") == {"llm-129", "llm-201"}
    assert hosts(data, "pct_tag_old") == set()
    assert hosts(data, "pct_status_running") == {"llm-129", "CT131-131", "llm-201"}
    assert hosts(data, "pct_status_stopped") == {"embed.example.net-130"}
    assert hosts(data, "pct_status_unknown") == {"far-301"}
    assert hosts(data, "pct_gpu") == {"llm-129", "embed.example.net-130", "llm-201"}
    assert hosts(data, "pct_gpu_pve1_1") == {"llm-129", "embed.example.net-130"}
    assert hosts(data, "pct_gpu_pve1_0") == {"llm-129"}
    assert hosts(data, "pct_gpu_pve2_0") == {"llm-201"}
    assert hosts(data, "pct_gpu_pve1_5") == set()
    assert hosts(data, "pct_gpu_shared") == {"llm-129", "embed.example.net-130"}
    assert hosts(read(nodes, group_prefix=""), "tag_gpu") == {"llm-129", "llm-201"}


def test_constructed(nodes: Nodes) -> None:
    data = read(
        nodes,
        groups={"gpu_nodes": "gpu_minors | length > 0 and pct_status == 'running'"},
        keyed_groups=[{"key": "pct_ostype", "prefix": "os"}],
        compose={"ansible_pct_host": "pct_node ~ '.example.net'"},
    )
    assert hosts(data, "gpu_nodes") == {"llm-129", "llm-201"}
    assert hosts(data, "os_alpine") == {"CT131-131"}
    assert data.hosts["llm-201"].vars["ansible_pct_host"] == "pve2.example.net"


def test_addresses(nodes: Nodes) -> None:
    """What was said, the way that was just used, what the cluster has, the name."""
    data = read(nodes, node_addresses={"pve3": "gate.example.net"})
    assert {name: host.vars["ansible_pct_host"] for name, host in data.hosts.items()} == {
        "llm-129": "pve1",
        "embed.example.net-130": "pve1",
        "CT131-131": "pve1",
        "llm-201": "198.51.100.2",
        "far-301": "gate.example.net",
    }


def test_hypervisors(nodes: Nodes) -> None:
    assert "hypervisors" not in read(nodes).groups
    data = read(nodes, hypervisors=True, user="ops")
    assert hosts(data, "hypervisors") == {"pve1", "pve2", "pve3"}
    assert data.hosts["pve2"].vars["ansible_host"] == "198.51.100.2"
    assert data.hosts["pve2"].vars["ansible_user"] == "ops"


def test_one_connection_for_all(nodes: Nodes) -> None:
    read(nodes)
    assert nodes.asked == ["pve1"]
    words = nodes.words
    assert words[words.index("--") + 1] == "pve1"
    assert "BatchMode=yes" in words
    remote = shlex.split(words[-1])
    assert remote[:2] == ["sh", "-c"]
    assert "/etc/pve/nodes/*/lxc/*.conf" in remote[2]


@pytest.mark.parametrize(
    ("options", "sudo", "variables"),
    [
        ({}, False, {}),
        ({"user": "root"}, False, {"ansible_pct_user": "root"}),
        ({"user": "ops"}, True, {"ansible_pct_user": "ops"}),
        ({"user": "ops", "sudo": False}, False, {"ansible_pct_user": "ops", "ansible_pct_sudo": False}),
        ({"sudo": True}, True, {"ansible_pct_sudo": True}),
        (
            {"port": 2222, "private_key_file": "/k", "ssh_args": "-o ProxyJump=gate -F 'a b'"},
            False,
            {
                "ansible_port": 2222,
                "ansible_ssh_private_key_file": "/k",
                "ansible_ssh_common_args": "-o ProxyJump=gate -F 'a b'",
            },
        ),
    ],
)
def test_login(nodes: Nodes, options: dict[str, Any], sudo: bool, variables: dict[str, Any]) -> None:
    """The way that the plugin takes is the way of the connection, too."""
    found = read(nodes, **options).hosts["llm-129"].vars
    names = ("pct_user", "pct_sudo", "port", "ssh_private_key_file", "ssh_common_args")
    assert {f"ansible_{n}": found[f"ansible_{n}"] for n in names if f"ansible_{n}" in found} == variables
    assert shlex.split(nodes.words[-1])[0] == ("sudo" if sudo else "sh")
    for word in ("User=ops", "Port=2222", "ProxyJump=gate", "a b"):
        assert (word in nodes.words) is (word.split("=")[-1] in str(options))


def test_the_next_node(nodes: Nodes, capsys: pytest.CaptureFixture[str]) -> None:
    nodes.answer("down", "", 255, "ssh: connect to host down port 22: No route to host")
    assert "llm-129" in read(nodes, hosts=["down", "pve1", "pve2"]).hosts
    assert nodes.asked == ["down", "pve1"]


@pytest.mark.parametrize(
    ("code", "err", "says"),
    [
        (255, "ssh: connect to host bad port 22: No route to host", "ssh failed: ssh: connect to host bad"),
        (255, "root@bad: Permission denied (publickey).", "ssh failed: root@bad: Permission denied"),
        (64, "cleanslate: no /etc/pve/nodes", "it is no Proxmox VE node"),
        (1, "sudo: a password is required", "sudo -n on the node refuses: sudo: a password is required"),
        (2, "grep: /etc/pve/nodes/pve1/lxc/129.conf: Permission denied", "log in as root (option user), or set sudo"),
        (127, "sh: 1: exec: grep: not found", "the reading ended with 127"),
    ],
)
def test_no_node_answers(nodes: Nodes, code: int, err: str, says: str) -> None:
    nodes.answer("bad", "", code, err)
    with pytest.raises(AnsibleParserError) as caught:
        read(nodes, hosts=["bad"])
    assert says in str(caught.value)
    assert "bad: " in str(caught.value)


def test_a_node_that_does_not_end(nodes: Nodes) -> None:
    nodes.ssh.write_text("#!/bin/sh\nexec sleep 60\n", encoding="utf-8")
    with pytest.raises(AnsibleParserError, match=r"did not answer within 0.2 s \(option timeout\)"):
        read(nodes, timeout=0.2)


def test_options_that_mean_nothing(nodes: Nodes) -> None:
    with pytest.raises(AnsibleParserError, match="hosts"):
        read(nodes, hosts=[])


def test_no_guests_at_all(nodes: Nodes) -> None:
    nodes.answer("pve1", "/proc/sys/kernel/hostname:pve1\n", 2, "grep: /etc/pve/nodes/*/lxc/*.conf: No such file")
    data = read(nodes, hypervisors=True)
    assert set(data.hosts) == {"pve1"}
    assert nodes.asked == ["pve1"]


def test_a_migration_during_the_reading(nodes: Nodes) -> None:
    """What vanished between the list and the reading is somewhere else: it is read again, once."""
    (nodes.folder / "pve1.first").write_text(
        "grep: /etc/pve/nodes/pve1/lxc/129.conf: No such file or directory\n", encoding="utf-8"
    )
    assert "llm-129" in read(nodes).hosts
    assert nodes.asked == ["pve1", "pve1"]


def test_an_id_on_two_nodes(nodes: Nodes) -> None:
    nodes.answer("pve1", reading_of(PVE) + "/etc/pve/nodes/pve2/lxc/129.conf:hostname: llm\n")
    with pytest.raises(AnsibleParserError, match="container 129 is on pve1 and on pve2"):
        read(nodes)
    assert nodes.asked == ["pve1", "pve1"]


def test_cache(nodes: Nodes) -> None:
    cached = {
        "cache": True,
        "cache_plugin": "jsonfile",
        "cache_connection": str(nodes.folder / "cache"),
        "cache_timeout": 300,
    }
    first = read(nodes, **cached)
    again = read(nodes, **cached)
    assert nodes.asked == ["pve1"]
    assert {name: host.vars for name, host in again.hosts.items()} == {n: h.vars for n, h in first.hosts.items()}
    # --flush-cache, and a refresh, read anew and keep that.
    nodes.answer("pve1", "/etc/pve/nodes/pve1/lxc/140.conf:hostname: new\n")
    assert set(read(nodes, use_cache=False, **cached).hosts) == {"new-140"}
    assert set(read(nodes, **cached).hosts) == {"new-140"}
    assert nodes.asked == ["pve1", "pve1"]


def test_hostile_configurations(nodes: Nodes) -> None:
    """Nothing of a configuration is a template, a host pattern, or a control sequence on a terminal."""
    nodes.answer(
        "pve1",
        "/etc/pve/nodes/pve1/lxc/150.conf:hostname: {{ lookup('pipe','id') }}\n"
        "/etc/pve/nodes/pve1/lxc/150.conf:tags: a[0:9];\x1b[31m\n"
        "/etc/pve/nodes/pve1/lxc/150.conf:dev0: /dev/nvidia0\x1b[2J\n",
    )
    data = read(nodes, compose={"copied": "pct_name"})
    (host,) = data.hosts.values()
    assert host.name.endswith("-150")
    assert not set(host.name) & set("{}[]:, '\x1b")
    assert host.vars["copied"] == "{{ lookup('pipe','id') }}"
    assert "\x1b" not in json.dumps(host.vars, ensure_ascii=False)
    assert not [name for name in data.groups if set(name) & set("[]:\x1b")]
