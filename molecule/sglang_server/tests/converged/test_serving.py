# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every declared server runs as declared, with nothing of it shown to others, and beside its neighbours."""

from __future__ import annotations

import json

import pytest
from look import Machine, get
from testinfra.host import Host

testinfra_hosts = ["lab://gpu_nodes", "lab://px1"]

STATE = "/var/lib/cleanslate"
#: Of each host its servers: name, GPUs (minors), port, variables that every process of it must have.
DECLARED = {
    "ct101": {
        "main": (
            {0, 1},
            30000,
            {
                "NCCL_ALGO": "allreduce:ring,tree",
                "NCCL_BUFFSIZE": "8388608",
                "NCCL_SOCKET_IFNAME": "lo",
                "MOLECULE_TEXT": 'a "b" $HOME 100% `id` \\ end',
            },
        )
    },
    "ct102": {"left": ({2}, 30001, {}), "right": ({3}, 30002, {"NCCL_PROTO": "Simple"})},
    "ct103": {"main": ({5}, 30000, {"NCCL_DEBUG": "WARN"})},
    "px1": {"of-the-host": ({4}, 30100, {"NCCL_DEBUG": "WARN"})},
}
KEYS = ("key of molecule: 100% $ecret", "admin-key-of-molecule")


@pytest.fixture
def servers(machine: Machine) -> dict:
    return DECLARED[machine.name]


def test_units(host: Host, machine: Machine, servers: dict) -> None:
    for name in servers:
        if machine.name == "ct103":  # its server has none
            assert not host.file(f"/etc/systemd/system/cleanslate-{name}.service").exists
        else:
            assert host.service(f"cleanslate-{name}").is_running


def test_every_process_has_the_declared_environment(machine: Machine, servers: dict) -> None:
    for name, (_gpus, _port, variables) in servers.items():
        processes = machine.instance(name)
        titles = {process.title for process in processes}
        assert "sglang::detokenizer" in titles
        assert any(title.startswith("sglang::scheduler") for title in titles)
        for process in processes:
            for key, value in variables.items():
                assert process.environment.get(key) == value, (key, process)


def test_gpus_are_held_by_their_server_alone(machine: Machine, servers: dict) -> None:
    for name, (gpus, _port, _variables) in servers.items():
        own = {process.pid for process in machine.instance(name)}
        for gpu in gpus:
            using = {process.pid for process in machine.holders(gpu) if process.uses(gpu, machine.gpus)}
            assert using and using <= own
        wanted = {f"GPU-fa4e0000-0000-4000-8000-{gpu:012x}" for gpu in gpus}
        for process in machine.instance(name):
            assert set(process.environment["CUDA_VISIBLE_DEVICES"].split(",")) == wanted


def test_it_answers(host: Host, machine: Machine, servers: dict) -> None:
    for port in (port for _gpus, port, _variables in servers.values()):
        key = KEYS[0] if machine.name == "ct101" else None
        question = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}}
        status, body = get(host, port, "/generate", question, key)
        assert status == 200
        assert json.loads(body)["meta_info"]["completion_tokens"] == 4
        if key:
            assert get(host, port, "/generate", question)[0] == 401


def test_files_are_for_root_alone(host: Host, machine: Machine, servers: dict) -> None:
    modes = {f"{STATE}/instances/{name}.json": 0o600 for name in servers}
    if machine.name != "ct103":
        modes.update({f"{STATE}/servers/{name}/environment": 0o640 for name in servers})
    if machine.name == "ct101":
        modes[f"{STATE}/servers/main/config.yaml"] = 0o600
    if machine.name == "ct103":
        modes[f"{STATE}/servers/main/server.log"] = 0o600
    assert {path: host.file(path).mode for path in modes} == modes


def test_keys_are_in_no_command_line_and_in_one_file(host: Host, machine: Machine) -> None:
    shown = json.dumps([process.words for process in machine.processes])
    for key in KEYS:
        assert key not in shown
        found = host.run("grep --recursive --files-with-matches --fixed-strings -- %s /run /etc " + STATE, key)
        assert found.stdout.split() == ([f"{STATE}/servers/main/config.yaml"] if machine.name == "ct101" else [])


def test_who_was_well_is_left_alone(host: Host, machine: Machine) -> None:
    """A server beside a broken one, and one that systemd itself has brought back."""
    name = {"ct102": "left", "px1": "of-the-host"}.get(machine.name)
    if name:
        (main,) = machine.running(name, "-m")
        assert main.inner_pid == int(host.file("/root/left").content_string)
