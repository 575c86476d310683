# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The two modules on a hypervisor's tree: what is told, what is written, what is left alone."""

from __future__ import annotations

import fcntl
import os
from typing import Any

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.pct import passthrough

from .conftest import Hypervisor

RULE, MOVED = "lxc.cgroup2.devices.allow: c 511:* rwm", "lxc.cgroup2.devices.allow: c 509:* rwm"


def look(hypervisor: Hypervisor, *containers: int) -> dict[str, Any]:
    return passthrough.look({"containers": list(containers)}, hypervisor.place)


def mend(hypervisor: Hypervisor, check_mode: bool = False, containers: tuple[int, ...] = ()) -> dict[str, Any]:
    params = {"containers": list(containers), "backup_dir": str(hypervisor.root / "backup")}
    return passthrough.mend(params, check_mode, hypervisor.place)


def test_all_is_well(hypervisor: Hypervisor) -> None:
    hypervisor.edit(130, "dev0: /dev/nvidia1,gid=44", "dev0: /dev/nvidia3,gid=44")
    found = look(hypervisor)
    assert (found["ok"], found["changed"], found["findings"], found["diff"]) == (True, False, [], [])
    assert [row["vmid"] for row in found["containers"]] == [129, 130, 131]
    assert found["host"]["majors"] == {"nvidia": [195], "nvidia-uvm": [511], "nvidiactl": [195]}
    assert mend(hypervisor)["changed"] is False
    assert not (hypervisor.root / "backup").exists()


def test_one_gpu_for_two_is_a_warning(hypervisor: Hypervisor) -> None:
    found = look(hypervisor)
    assert found["ok"]
    assert [(row["code"], row["vmid"], row["path"]) for row in found["findings"]] == [
        ("shared_gpu", 129, "/dev/nvidia1"),
        ("shared_gpu", 130, "/dev/nvidia1"),
    ]
    assert found["containers"][0]["gpu_shared_with"] == [130]
    # Also when only one of the two is asked for.
    assert [row["vmid"] for row in look(hypervisor, 130)["findings"]] == [130]


def test_looking_changes_nothing_and_shows_what_would(hypervisor: Hypervisor) -> None:
    hypervisor.edit(129, RULE, MOVED)
    before = hypervisor.conf(129).read_text(encoding="utf-8")
    found = look(hypervisor, 129)
    assert not found["ok"]
    (finding,) = [row for row in found["findings"] if row["severity"] == "error"]
    assert (finding["code"], finding["remove"], finding["add"]) == ("major_moved", [MOVED], [RULE])
    (diff,) = found["diff"]
    assert diff["before"] == before
    assert diff["after"] == before.replace(MOVED, RULE)
    assert diff["after_header"] == "/etc/pve/lxc/129.conf"
    assert hypervisor.conf(129).read_text(encoding="utf-8") == before


def test_mending(hypervisor: Hypervisor) -> None:
    """The line is changed, notes and snapshots stay, a copy is kept, and the second run changes nothing."""
    hypervisor.edit(129, RULE, MOVED)
    before = hypervisor.conf(129).read_text(encoding="utf-8")
    done = mend(hypervisor)
    assert done["changed"]
    assert done["ok"]
    (row,) = done["fixed"]
    assert (row["vmid"], row["codes"], row["restart"]) == (129, ["major_moved"], True)
    assert hypervisor.conf(129).read_text(encoding="utf-8") == before.replace(MOVED, RULE)
    with open(row["backup_file"], encoding="utf-8") as copy:
        assert copy.read() == before
    assert os.stat(row["backup_file"]).st_mode & 0o777 == 0o600
    assert sorted(os.listdir(hypervisor.root / "etc/pve/lxc")) == ["129.conf", "130.conf", "131.conf", "900.conf"]
    again = mend(hypervisor)
    assert (again["changed"], again["fixed"], again["diff"]) == (False, [], [])


def test_check_mode(hypervisor: Hypervisor) -> None:
    hypervisor.edit(129, RULE, MOVED)
    before = hypervisor.conf(129).read_text(encoding="utf-8")
    done = mend(hypervisor, check_mode=True)
    assert done["changed"]
    assert [row["backup_file"] for row in done["fixed"]] == [""]
    assert hypervisor.conf(129).read_text(encoding="utf-8") == before
    assert not (hypervisor.root / "backup").exists()


def test_a_locked_container_is_left_alone(hypervisor: Hypervisor) -> None:
    hypervisor.edit(130, "dev2: /dev/nvidia-uvm,gid=44\n", "")
    before = hypervisor.conf(130).read_text(encoding="utf-8")
    done = mend(hypervisor)
    assert not done["changed"]
    assert [(row["vmid"], row["reason"]) for row in done["kept"]] == [
        (130, "it is locked (backup): wait for its end, or `pct unlock 130`")
    ]
    assert hypervisor.conf(130).read_text(encoding="utf-8") == before


def test_what_changed_meanwhile_is_kept(hypervisor: Hypervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the lock another program writes the file."""
    hypervisor.edit(129, RULE, MOVED)
    write = passthrough._write

    def later(*args: Any) -> Any:
        hypervisor.edit(129, "cores: 64", "cores: 32")
        return write(*args)

    monkeypatch.setattr(passthrough, "_write", later)
    assert mend(hypervisor)["changed"]
    text = hypervisor.conf(129).read_text(encoding="utf-8")
    assert "cores: 32" in text
    assert RULE in text


def test_a_configuration_that_another_program_is_changing(
    hypervisor: Hypervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    hypervisor.edit(129, RULE, MOVED)
    monkeypatch.setattr(passthrough, "_LOCK_SECONDS", 0.05)
    lock = hypervisor.root / "run/lock/lxc/pve-config-129.lock"
    lock.parent.mkdir(parents=True)
    with open(lock, "w", encoding="utf-8") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = mend(hypervisor)
    assert not done["changed"]
    assert "being changed by another program" in done["kept"][0]["reason"]
    assert MOVED in hypervisor.conf(129).read_text(encoding="utf-8")


def test_bytes_that_are_no_text_survive(hypervisor: Hypervisor) -> None:
    conf = hypervisor.conf(129)
    conf.write_bytes(b"#caf\xe9\n" + conf.read_bytes().replace(RULE.encode(), MOVED.encode()))
    assert mend(hypervisor)["changed"]
    assert conf.read_bytes().startswith(b"#caf\xe9\n#Serves")


def test_a_file_system_that_takes_nothing(hypervisor: Hypervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    hypervisor.edit(129, RULE, MOVED)
    before = hypervisor.conf(129).read_bytes()

    def refuse(source: str, target: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(passthrough.os, "rename", refuse)
    with pytest.raises(CleanslateError, match=r"It is as it was. Is the cluster quorate"):
        passthrough._replace(str(hypervisor.conf(129)), "x\n")
    assert hypervisor.conf(129).read_bytes() == before
    assert not list(hypervisor.conf(129).resolve().parent.glob("*.tmp.*"))


def test_a_container_that_is_not_here(hypervisor: Hypervisor) -> None:
    with pytest.raises(CleanslateError, match=r"201, 900: not on this node, or a template. Here are: 129, 130, 131"):
        look(hypervisor, 129, 201, 900)
