# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The connection plugin between Ansible and ssh: options, what ssh is told to run, what comes back. ssh is a script."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible import constants
from ansible.errors import AnsibleConnectionFailure, AnsibleError, AnsibleFileNotFound
from ansible.playbook.play_context import PlayContext

from ansible_collections.cleanslate.inference.plugins.connection import pct
from ansible_collections.cleanslate.inference.plugins.doc_fragments import ssh_options

NAME = "cleanslate.inference.pct"

# Stands for ssh and the hypervisor: keeps its words, then runs the line with a pct that enters nothing. What the file
# `fail` holds is said instead: its first line is the code, the rest goes to stderr.
SSH = """#!/bin/sh
printf '%s\\n' "$@" > "$RECORD/words"
echo run >> "$RECORD/runs"
for line do :; done
if [ -e "$RECORD/fail" ]; then tail -n +2 "$RECORD/fail" >&2; exit "$(head -n 1 "$RECORD/fail")"; fi
pct() { while [ "$1" != -- ]; do shift; done; shift; "$@"; }
eval "$line"
"""


@pytest.fixture(autouse=True, scope="module")
def _options() -> None:
    """What Ansible's plugin loader does with a plugin's documentation."""
    options = yaml.safe_load(ssh_options.ModuleDocFragment.DOCUMENTATION)["options"]
    options.update(yaml.safe_load(pct.DOCUMENTATION)["options"])
    constants.config.initialize_plugin_configuration_definitions("connection", NAME, options)


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH, encoding="utf-8")
    ssh.chmod(0o755)
    monkeypatch.setenv("RECORD", str(tmp_path))
    return tmp_path


def connect(record: Path, **variables: Any) -> Any:
    connection = pct.Connection(PlayContext())
    connection._load_name = NAME
    known = {
        "inventory_hostname": "ct131",
        "ansible_pct_vmid": 131,
        "ansible_pct_host": "px1",
        "ansible_user": "root",
        "ansible_ssh_executable": str(record / "ssh"),
        **variables,
    }
    connection.set_options(var_options={key: value for key, value in known.items() if value is not None})
    return connection


def words(record: Path) -> list[str]:
    return (record / "words").read_text(encoding="utf-8").splitlines()


def test_a_command(record: Path) -> None:
    assert connect(record).exec_command("echo out; echo err >&2; exit 7") == (7, b"out\n", b"err\n")
    assert "px1" in words(record)
    assert 'User="root"' in words(record)


def test_a_commands_255_is_its_own_and_runs_once(record: Path) -> None:
    connection = connect(record, ansible_ssh_retries=3)
    assert connection.exec_command("exit 255")[0] == 255
    assert (record / "runs").read_text(encoding="utf-8") == "run\n"


def test_input(record: Path) -> None:
    assert connect(record).exec_command("cat", in_data=b"in\x00\xff")[1] == b"in\x00\xff"


def test_pipelining_is_on_by_default(record: Path) -> None:
    connection = connect(record)
    assert connection.is_pipelining_enabled()
    assert not connect(record, ansible_pipelining=False).is_pipelining_enabled()


def test_a_stopped_guest_is_unreachable_and_not_asked_again(record: Path) -> None:
    (record / "fail").write_text("255\ncontainer '131' not running!\n", encoding="utf-8")
    connection = connect(record, ansible_ssh_retries=3)
    with pytest.raises(AnsibleConnectionFailure, match="px1: container 131 is not running"):
        connection.exec_command("true")
    with pytest.raises(AnsibleConnectionFailure, match="px1: container 131 is not running"):
        connection.exec_command("cat", in_data=b"module")
    assert (record / "runs").read_text(encoding="utf-8") == "run\nrun\n"


def test_an_unreachable_hypervisor_is_tried_again(record: Path) -> None:
    (record / "fail").write_text("255\nssh: connect to host px1 port 22: No route to host\n", encoding="utf-8")
    with pytest.raises(AnsibleConnectionFailure, match="No route to host"):
        connect(record, ansible_ssh_retries=1).exec_command("true")
    assert (record / "runs").read_text(encoding="utf-8") == "run\nrun\n"


def test_the_id_and_the_host_come_from_an_inventory_of_proxmox_too(record: Path) -> None:
    names = {"ansible_pct_vmid": None, "ansible_pct_host": None, "proxmox_vmid": 140, "ansible_host": "px2"}
    connect(record, **names).exec_command("true")
    assert "px2" in words(record)
    assert shlex.split("\n".join(words(record)[words(record).index("px2") + 1 :]))[:3] == ["pct", "exec", "140"]


def test_the_more_special_name_wins(record: Path) -> None:
    connect(record, ansible_host="10.0.0.9", proxmox_vmid=1000).exec_command("true")
    assert "px1" in words(record)
    assert "10.0.0.9" not in words(record)


def test_no_id(record: Path) -> None:
    with pytest.raises(AnsibleError, match="ansible_pct_vmid"):
        connect(record, ansible_pct_vmid=None).exec_command("true")


def test_a_wrong_id(record: Path) -> None:
    with pytest.raises(AnsibleError, match="not a container id"):
        connect(record, ansible_pct_vmid="131; reboot").exec_command("true")
    assert not (record / "words").exists()


@pytest.mark.parametrize(
    ("user", "sudo", "expected"),
    [("root", None, False), ("admin", None, True), ("admin", False, False), ("root", True, True)],
)
def test_sudo(record: Path, user: str, sudo: bool | None, expected: bool) -> None:
    connection = connect(record, ansible_user=user, ansible_pct_sudo=sudo)
    (record / "fail").write_text("1\nsudo: a password is required\n", encoding="utf-8")
    with pytest.raises(AnsibleConnectionFailure, match="a password is required"):
        connection.exec_command("true")
    assert ("sudo -n pct exec" in "\n".join(words(record))) is expected
    assert f'User="{user}"' in words(record)


def test_home_directories_are_those_of_the_guests_root(record: Path) -> None:
    assert connect(record, ansible_user="admin").get_option("remote_user") == "root"


def test_no_terminal_unless_asked_for(record: Path) -> None:
    connect(record).exec_command("true")
    assert "-tt" not in words(record)
    connect(record, ansible_ssh_use_tty=True).exec_command("true")
    assert "-tt" in words(record)


@pytest.mark.parametrize("content", [b"", b"text\n", b"\x00\xff" * 700_000], ids=["empty", "small", "large"])
def test_files_both_ways(record: Path, tmp_path: Path, content: bytes) -> None:
    source, there, back = tmp_path / "so urce", tmp_path / "the're $x", tmp_path / "ba ck"
    source.write_bytes(content)
    connection = connect(record)
    connection.put_file(str(source), str(there))
    assert there.read_bytes() == content
    connection.fetch_file(str(there), str(back))
    assert back.read_bytes() == content


def test_a_file_that_is_not_there(record: Path, tmp_path: Path) -> None:
    connection = connect(record)
    with pytest.raises(AnsibleFileNotFound):
        connection.put_file(str(tmp_path / "no"), "/tmp/x")
    with pytest.raises(AnsibleError, match="No such file"):
        connection.fetch_file(str(tmp_path / "no"), str(tmp_path / "back"))
    assert not (tmp_path / "back").exists()


def test_a_folder_that_is_not_there(record: Path, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"x" * 300_000)
    with pytest.raises(AnsibleError, match="failed to transfer"):
        connect(record).put_file(str(tmp_path / "source"), str(tmp_path / "no/such/x"))


def test_a_stopped_guest_gives_no_file(record: Path, tmp_path: Path) -> None:
    (record / "fail").write_text("255\ncontainer '131' not running!\n", encoding="utf-8")
    with pytest.raises(AnsibleConnectionFailure, match="not running"):
        connect(record).fetch_file("/etc/hostname", str(tmp_path / "back"))
    assert not (tmp_path / "back").exists()
