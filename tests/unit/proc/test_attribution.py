# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a cgroup path says of a process, and every parser under hostile text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ansible_collections.cleanslate.inference.plugins.module_utils.proc.attribution import (
    attribute,
    container_of,
    parse_cgroups,
    units_of,
)
from ansible_collections.cleanslate.inference.plugins.module_utils.proc.table import ProcFS

from ..proctree import ProcTree

ID = "0123456789abcdef" * 4
hostile = some.binary(max_size=80).map(lambda raw: raw.decode("utf-8", "surrogateescape")) | some.text(max_size=80)


@pytest.mark.parametrize(
    ("path", "container", "unit", "user_unit"),
    [
        ("/system.slice/sglang-main.service", "", "sglang-main.service", ""),
        ("/system.slice/sglang-main.service/worker", "", "sglang-main.service", ""),
        ("/system.slice/system-getty.slice/getty@tty1.service", "", "getty@tty1.service", ""),
        ("/user.slice/user-1000.slice/session-3.scope", "", "session-3.scope", ""),
        (
            "/user.slice/user-1000.slice/user@1000.service/app.slice/serve.service",
            "",
            "user@1000.service",
            "serve.service",
        ),
        ("/user.slice/user-1000.slice/user@1000.service/init.scope", "", "user@1000.service", ""),
        ("/init.scope", "", "init.scope", ""),
        ("/", "", "", ""),
        ("/lxc/129/ns/system.slice/sglang.service", "lxc/129", "sglang.service", ""),
        ("/lxc/129/ns/.lxc", "lxc/129", "", ""),
        ("/lxc/129/ns", "lxc/129", "", ""),
        ("/lxc.payload.web/system.slice/a.service", "lxc/web", "a.service", ""),
        ("/lxc.monitor/129", "", "", ""),
        ("/lxc.monitor.web", "", "", ""),
        ("/lxc/129/ns/system.slice/docker-%s.scope" % ID, "lxc/129", "docker-%s.scope" % ID, ""),
        ("/system.slice/docker-%s.scope" % ID, "docker/0123456789ab", "", ""),
        ("/docker/%s" % ID, "docker/0123456789ab", "", ""),
        ("/docker/%s/init.scope" % ID, "docker/0123456789ab", "init.scope", ""),
        ("/system.slice/docker.service", "", "docker.service", ""),
        ("/machine.slice/libpod-%s.scope/container" % ID, "podman/0123456789ab", "", ""),
        ("/machine.slice/libpod-conmon-%s.scope" % ID, "", "libpod-conmon-%s.scope" % ID, ""),
        (
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod12345678_1234_1234_1234_123456789abc.slice/"
            "cri-containerd-%s.scope" % ID,
            "kubernetes/0123456789ab",
            "",
            "",
        ),
        ("/kubepods/burstable/pod12345678-1234-1234-1234-123456789abc/%s" % ID, "kubernetes/0123456789ab", "", ""),
        ("/system.slice/slurmstepd.scope/job_77/step_0/user/task_0", "slurm/77", "", ""),
        ("/slurm/uid_1000/job_78/step_batch", "slurm/78", "", ""),
        ("/machine.slice/systemd-nspawn@box.service/payload/system.slice/x.service", "nspawn/box", "x.service", ""),
        ("/qemu.slice/100.scope", "vm/100", "", ""),
        ("/system.slice/lxc-129.service", "", "lxc-129.service", ""),
        ("/user.slice/mylxc/129/ns/x", "", "", ""),
    ],
)
def test_containers_and_units(tmp_path: Path, path: str, container: str, unit: str, user_unit: str) -> None:
    tree = ProcTree(tmp_path)
    tree.add(3081, cgroup=path, nspid=[3081, 46])
    owner = attribute(ProcFS(str(tree.proc)).process(3081))
    assert (owner.container, owner.unit, owner.user_unit) == (container, unit, user_unit)
    assert (owner.host_pid, owner.guest_pid) == (3081, 46)


def test_slurm_of_version_1_is_found_in_any_hierarchy() -> None:
    raw = b"12:freezer:/slurm/uid_0/job_5/step_0\n1:name=systemd:/system.slice/slurmd.service\n0::/\n"
    assert container_of(parse_cgroups(raw))[:2] == ("slurm", "5")


@pytest.mark.parametrize("order", [1, -1])
def test_an_unused_hierarchy_of_version_1_hides_no_unit(order: int) -> None:
    lines = [b"9:name=systemd:/", b"8:pids:/", b"0::/system.slice/sglang.service"][::order]
    assert units_of(container_of(parse_cgroups(b"\n".join(lines)))[2]) == ("sglang.service", "", None)


def test_users_of_a_container_are_numbers(tmp_path: Path) -> None:
    tree = ProcTree(tmp_path)
    tree.add(2, uid=100000, cgroup="/lxc/130/ns/init.scope")
    tree.add(3, uid=0, cgroup="/lxc/129/ns/init.scope")
    fs = ProcFS(str(tree.proc))
    assert attribute(fs.process(2)).user == "100000"
    assert attribute(fs.process(3)).user == "root"


@given(hostile)
def test_no_path_breaks_the_parsers(path: str) -> None:
    kind, ident, inside = container_of([path])
    assert bool(kind) == bool(ident)
    units_of(inside)


@given(some.binary(max_size=200))
def test_no_text_breaks_the_list_of_hierarchies(raw: bytes) -> None:
    for path in parse_cgroups(raw):
        assert "\n" not in path


@given(hostile.filter(lambda text: "\n" not in text and "\0" not in text))
def test_nothing_of_it_is_unprintable(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    tree = ProcTree(tmp_path_factory.mktemp("tree") / "machine")
    tree.add(5, cgroup="/system.slice/%s.service" % name)
    owner = attribute(ProcFS(str(tree.proc)).process(5))
    assert (owner.unit + owner.container).isprintable()
