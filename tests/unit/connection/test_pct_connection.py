# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The connection plugin between Ansible and ssh: options, what ssh is told to run, what comes back. ssh is a script."""

from __future__ import annotations

import os
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
# `fail` holds is said instead: its first line is the code, the rest goes to stderr. What opens a connection, and what
# asks the hypervisor about a guest, is kept apart and answered by the files `opened` and `view`.
SSH = """#!/bin/sh
for line do :; done
case $line in
:) echo open >> "$RECORD/opens"; [ ! -e "$RECORD/closed" ] || { cat "$RECORD/closed" >&2; exit 255; }; exit 0 ;;
*"v=\\$1 t=\\$2"*) echo "$line" >> "$RECORD/looks"; cat "$RECORD/view"; exit ;;
esac
printf '%s\\n' "$@" > "$RECORD/words"
echo run >> "$RECORD/runs"
if [ -e "$RECORD/fail" ]; then tail -n +2 "$RECORD/fail" >&2; exit "$(head -n 1 "$RECORD/fail")"; fi
pct() {
    case $*,$(ls "$RECORD") in *keep-env*,*old*)
        printf 'Unknown option: keep-env\\n400 unable to parse option\\n' >&2
        return 2 ;;
    esac
    while [ "$1" != -- ]; do shift; done; shift; "$@"
}
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
        "ansible_control_path_dir": str(record / "cp"),
        "ansible_ssh_args": "-o ControlMaster=auto -o ControlPersist=60s",
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
    (record / "closed").write_text("ssh: connect to host px1 port 22: No route to host\n", encoding="utf-8")
    with pytest.raises(AnsibleConnectionFailure, match="No route to host"):
        connect(record, ansible_ssh_retries=1).exec_command("true")
    assert (record / "opens").read_text(encoding="utf-8") == "open\nopen\n"
    assert not (record / "runs").exists()


def test_ssh_that_fails_before_the_command_began_is_tried_again(record: Path) -> None:
    (record / "fail").write_text("255\nmux_client_request_session: read from master failed\n", encoding="utf-8")
    with pytest.raises(AnsibleConnectionFailure, match="read from master failed"):
        connect(record, ansible_ssh_retries=1).exec_command("true")
    assert (record / "runs").read_text(encoding="utf-8") == "run\nrun\n"


@pytest.mark.parametrize("in_data", [None, b"module"])
def test_a_command_that_was_cut_off_is_not_run_again(record: Path, in_data: bytes | None) -> None:
    connection = connect(record, ansible_ssh_retries=3)
    (record / "fail").write_text(f"255\n{connection._entry.token} in 77\nclosed by px1\n", encoding="utf-8")
    with pytest.raises(AnsibleConnectionFailure, match="may still run in container 131 as process 77: closed by px1"):
        connection.exec_command("true", in_data=in_data)
    assert (record / "runs").read_text(encoding="utf-8") == "run\n"


def test_a_guest_on_another_node_is_found(record: Path) -> None:
    (record / "fail").write_text("2\nConfiguration file 'nodes/px1/lxc/131.conf' does not exist\n", encoding="utf-8")
    (record / "view").write_text("at /etc/pve/nodes/px7/lxc/131.conf\nhere nodes/px1\n", encoding="utf-8")
    with pytest.raises(AnsibleConnectionFailure, match="container 131 is on node px7, not on px1"):
        connect(record).exec_command("true")


def test_an_old_pct_is_asked_once(record: Path) -> None:
    (record / "old").touch()
    assert connect(record).exec_command("cat", in_data=b"in")[1] == b"in"
    assert (record / "runs").read_text(encoding="utf-8") == "run\nrun\n"
    assert connect(record).exec_command("cat", in_data=b"in")[1] == b"in"
    assert (record / "runs").read_text(encoding="utf-8") == "run\nrun\nrun\n"


def test_input_that_nobody_gives_is_empty(record: Path) -> None:
    assert connect(record).exec_command("cat") == (0, b"", b"")


def test_on_the_hypervisor_itself(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No ssh; pct is the one on PATH."""
    pct_here = record / "pct"
    pct_here.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done; shift; exec "$@"\n', encoding="utf-8")
    pct_here.chmod(0o755)
    monkeypatch.setenv("PATH", f"{record}:/usr/bin:/bin")
    connection = connect(record, ansible_pct_mode="local", ansible_pct_host=None, ansible_pct_sudo=False)
    assert connection.exec_command("echo out; echo err >&2; exit 255") == (255, b"out\n", b"err\n")
    (record / "source").write_bytes(b"\x00" * 200_000)
    connection.put_file(str(record / "source"), str(record / "there"))
    connection.fetch_file(str(record / "there"), str(record / "back"))
    assert (record / "back").read_bytes() == b"\x00" * 200_000
    connection.reset()
    assert not (record / "words").exists()


def test_a_control_node_without_room(record: Path) -> None:
    (record / "source").write_bytes(b"x" * 300_000)
    with pytest.raises(AnsibleError, match=r"cannot write /dev/full on the control node: .*No space"):
        connect(record).fetch_file(str(record / "source"), "/dev/full")
    assert os.path.exists("/dev/full")


def test_the_connections_own_arguments_go_last(record: Path) -> None:
    """ssh takes the first of equal options: the user's."""
    connect(record, ansible_ssh_common_args="-o ServerAliveInterval=3").exec_command("true")
    given = [word for word in words(record) if word.startswith("ServerAliveInterval")]
    assert given == ["ServerAliveInterval=3", "ServerAliveInterval=15"]


def test_a_control_path_of_the_users_own_stays(record: Path) -> None:
    connect(record, ansible_control_path="%(directory)s/mine").exec_command("true")
    assert f'ControlPath="{record}/cp/mine"' in words(record)
    assert not (record / "opens").exists()


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
