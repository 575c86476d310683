# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is wrong with passed devices, what would be right, and that mending it leaves nothing to mend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.cleanslate.inference.plugins.module_utils.pct.check import (
    Finding,
    check,
    check_guest,
    mended,
)
from ansible_collections.cleanslate.inference.plugins.module_utils.pct.conf import parse_conf
from ansible_collections.cleanslate.inference.plugins.module_utils.pct.devices import handed
from ansible_collections.cleanslate.inference.plugins.module_utils.pct.host import (
    Device,
    GuestView,
    HostView,
    InsideView,
)

MAJORS = {"mem": {1}, "nvidia": {195}, "media": {238}, "nvidia-uvm": {511}, "nvidia-caps": {237}}
NODES = {f"/dev/nvidia{minor}": Device("c", 195, minor, 0o666) for minor in range(4)}
NODES |= {"/dev/nvidiactl": Device("c", 195, 255, 0o666), "/dev/nvidia-uvm": Device("c", 511, 0, 0o666)}

CONTROL = [
    "lxc.mount.entry: /dev/nvidiactl dev/nvidiactl none bind,optional,create=file",
    "lxc.mount.entry: /dev/nvidia-uvm dev/nvidia-uvm none bind,optional,create=file",
]
ALLOW = ["lxc.cgroup2.devices.allow: c 195:* rwm", "lxc.cgroup2.devices.allow: c 511:* rwm"]
GPU = "lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file"
BOUND = [*ALLOW, GPU, *CONTROL]
PASSED = ["dev0: /dev/nvidia0,gid=44", "dev1: /dev/nvidiactl,gid=44", "dev2: /dev/nvidia-uvm,gid=44"]


def host(
    devices: Mapping[str, Device | None] | None = None, majors: Any = None, version: str = "580.159.04"
) -> HostView:
    found = {path: device for path, device in {**NODES, **(devices or {})}.items() if device is not None}
    return HostView("pve1", MAJORS if majors is None else majors, version, found)


def guest(*lines: str, vmid: int = 129, inside: InsideView | None = None) -> GuestView:
    conf = parse_conf("".join(line + "\n" for line in ("hostname: llm", *lines)))
    return GuestView(vmid, conf, handed(conf), inside, inside is not None)


def codes(findings: list[Finding]) -> list[str]:
    return [finding.code for finding in findings]


@pytest.mark.parametrize("lines", [BOUND, PASSED, [], ["lxc.mount.entry: /srv srv none bind"]])
def test_nothing_is_wrong(lines: list[str]) -> None:
    assert check(host(), [guest(*lines)]) == []
    assert mended(host(), guest(*lines))[1] == []


@pytest.mark.parametrize(
    ("lines", "found", "remove", "add"),
    [
        pytest.param(
            [ALLOW[0], "lxc.cgroup2.devices.allow: c 509:* rwm", GPU, *CONTROL],
            ["major_moved"],
            ["lxc.cgroup2.devices.allow: c 509:* rwm"],
            ["lxc.cgroup2.devices.allow: c 511:* rwm"],
            id="nvidia-uvm has another number since the last boot",
        ),
        pytest.param(
            [ALLOW[0], "lxc.cgroup2.devices.allow: c 238:* rwm", GPU, *CONTROL],
            ["major_moved"],
            ["lxc.cgroup2.devices.allow: c 238:* rwm"],
            ["lxc.cgroup2.devices.allow: c 511:* rwm"],
            id="its old number is another driver's now",
        ),
        pytest.param(
            [ALLOW[0], GPU, *CONTROL],
            ["not_allowed"],
            [],
            ["lxc.cgroup2.devices.allow: c 511:* rwm"],
            id="no rule for nvidia-uvm",
        ),
        pytest.param(
            ["lxc.cgroup.devices.allow: c 195:* rwm", "lxc.cgroup2.devices.allow: c 511:* rwm", GPU, *CONTROL],
            ["cgroup1_rule"],
            ["lxc.cgroup.devices.allow: c 195:* rwm"],
            ["lxc.cgroup2.devices.allow: c 195:* rwm"],
            id="a rule of cgroup version 1",
        ),
        pytest.param(
            [*BOUND, "lxc.cgroup.devices.allow: c 195:* rwm"],
            ["cgroup1_rule"],
            ["lxc.cgroup.devices.allow: c 195:* rwm"],
            [],
            id="and the right one beside it",
        ),
        pytest.param(
            [*ALLOW, GPU, CONTROL[0]], ["missing_control_node"], [], [CONTROL[1]], id="no nvidia-uvm, bind-mounted"
        ),
        pytest.param(
            [PASSED[0], "dev7: /dev/nvidiactl"],
            ["missing_control_node"],
            [],
            ["dev8: /dev/nvidia-uvm,gid=44"],
            id="no nvidia-uvm, devN",
        ),
        pytest.param(
            [*ALLOW, "lxc.mount.entry: /dev/nvidia0 /dev/nvidia0 none bind,optional,create=file", *CONTROL],
            ["absolute_target"],
            ["lxc.mount.entry: /dev/nvidia0 /dev/nvidia0 none bind,optional,create=file"],
            [GPU],
            id="a target with a leading slash",
        ),
        pytest.param([*BOUND, GPU], ["duplicate_target"], [GPU], [], id="the same line twice"),
    ],
)
def test_what_lines_can_mend(lines: list[str], found: list[str], remove: list[str], add: list[str]) -> None:
    before = guest(*lines)
    findings = check(host(), [before])
    assert codes(findings) == found
    text, done = mended(host(), before)
    assert sorted(set(codes(done))) == sorted(set(found))
    now, then = text.splitlines(), list(before.conf.lines)
    assert [line for line in then if then.count(line) > now.count(line)] in (remove, remove * 2)
    assert [line for line in now if now.count(line) > then.count(line)] == add
    assert check(host(), [guest(*now[1:])]) == []
    for finding in findings:
        if finding.fixable:
            assert "line" in finding.msg or "Add" in finding.msg


@pytest.mark.parametrize(
    ("lines", "devices", "found", "says"),
    [
        pytest.param(
            [*PASSED, "dev3: /dev/nvidia7"],
            {},
            "missing_node",
            "it does not start. The host has /dev/nvidia-uvm",
            id="gone",
        ),
        pytest.param(PASSED, {"/dev/nvidia-uvm": None}, "missing_node", "nvidia-modprobe -u -c 0", id="uvm not loaded"),
        pytest.param(BOUND, {"/dev/nvidia-uvm": None}, "missing_node", "it starts without it", id="optional"),
        pytest.param(
            [*PASSED, "dev3: /dev/dri/renderD128"], {}, "missing_node", "Load its driver", id="of another maker"
        ),
        pytest.param(
            ["dev0: /dev/odd"], {"/dev/odd": Device("file")}, "not_a_device", "does not start", id="no device node"
        ),
        pytest.param(
            ["unprivileged: 1", *BOUND],
            {"/dev/nvidia0": Device("c", 195, 0, 0o660)},
            "no_permission",
            "Write `devN: /dev/nvidia0`",
            id="a mode that keeps others out",
        ),
        pytest.param(
            [*BOUND, "lxc.mount.entry: /dev/nvidia1 dev/nvidia0 none bind,create=file"],
            {},
            "duplicate_target",
            "both lead to /dev/nvidia0",
            id="two devices for one target",
        ),
        pytest.param(
            [*BOUND, "lxc.cgroup2.devices.allow: c 400:* rwm"],
            {},
            "unused_rule",
            "major number 400, which no driver has now",
            id="a rule for nobody",
        ),
        pytest.param([*BOUND, "lxc.mount.entry: /dev/x"], {}, "bad_line", "line 7", id="half a line"),
    ],
)
def test_what_lines_cannot_mend(lines: list[str], devices: dict[str, Device | None], found: str, says: str) -> None:
    (finding,) = check(host(devices), [guest(*lines)])
    assert (finding.code, finding.fixable, finding.vmid) == (found, False, 129)
    assert says in finding.msg
    assert finding.msg.startswith("container 129 (llm): ")


def test_a_privileged_container_does_not_mind_the_mode() -> None:
    assert check(host({"/dev/nvidia0": Device("c", 195, 0, 0o660)}), [guest(*BOUND)]) == []


def test_a_mounted_folder_needs_rules_for_what_is_in_it() -> None:
    caps = {"/dev/nvidia-caps": Device("folder"), "/dev/nvidia-caps/nvidia-cap1": Device("c", 237, 1, 0o444)}
    line = "lxc.mount.entry: /dev/nvidia-caps dev/nvidia-caps none bind,optional,create=dir"
    (finding,) = check(host(caps), [guest(*BOUND, line)])
    assert finding.code == "not_allowed"
    assert finding.data()["add"] == ["lxc.cgroup2.devices.allow: c 237:* rwm"]


def test_a_rule_for_another_driver_stays() -> None:
    """What is missing is a number that never moves, so the rule for the media devices is meant as it stands."""
    lines = ["lxc.cgroup2.devices.allow: c 238:* rwm", ALLOW[1], GPU, *CONTROL]
    text, done = mended(host(), guest(*lines))
    assert codes(done) == ["not_allowed"]
    assert "lxc.cgroup2.devices.allow: c 238:* rwm" in text
    assert ALLOW[0] in text


def test_a_rule_of_cgroup_version_1_for_an_old_number() -> None:
    """Both are mended, in one line."""
    lines = [ALLOW[0], "lxc.cgroup.devices.allow: c 509:* rwm", GPU, *CONTROL]
    assert [(f.code, f.severity) for f in check(host(), [guest(*lines)])] == [
        ("cgroup1_rule", "error"),
        ("major_moved", "error"),
    ]
    assert mended(host(), guest(*lines))[0].splitlines()[1:] == [*ALLOW, GPU, *CONTROL]


def test_a_rule_of_cgroup_version_1_that_is_not_needed() -> None:
    (finding,) = check(host(), [guest(*BOUND, "lxc.cgroup.devices.allow: c 195:* rwm")])
    assert finding.severity == "warning"


def test_a_hook_needs_no_control_nodes() -> None:
    assert check(host(), [guest(*ALLOW, GPU, "lxc.hook.mount: /usr/share/lxc/hooks/nvidia")]) == []


def test_without_a_driver_numbers_are_not_judged() -> None:
    devices = {path: Device("c", 7, index, 0o666) for index, path in enumerate(NODES)}
    lines = ["lxc.cgroup2.devices.allow: c 7:* rwm", "lxc.cgroup2.devices.allow: c 509:* rwm", GPU, *CONTROL]
    assert check(host(devices, majors={"mem": {1}}, version=""), [guest(*lines)]) == []


def test_a_host_node_of_an_earlier_boot() -> None:
    """It is the host's to mend; rules are judged by what will stand there then."""
    findings = check(host({"/dev/nvidia-uvm": Device("c", 509, 0, 0o666)}), [guest(*BOUND)])
    assert [(f.code, f.vmid) for f in findings] == [("stale_node", None)]
    assert "rm /dev/nvidia-uvm; nvidia-modprobe -u -c 0" in findings[0].msg


def test_a_plain_file_on_the_host() -> None:
    findings = check(host({"/dev/nvidia3": Device("file")}), [])
    assert [(f.code, f.path) for f in findings] == [("plain_file", "/dev/nvidia3")]


def inside(devices: Mapping[str, Device | None] | None = None, **more: Any) -> InsideView:
    found = {path: NODES[path] for path in ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm")}
    found |= devices or {}
    defaults: dict[str, Any] = {"libraries": ("580.159.04",), "linked": "580.159.04", "has_library": True}
    return InsideView({p: d for p, d in found.items() if d is not None}, **{**defaults, **more})


@pytest.mark.parametrize(
    ("view", "found", "says"),
    [
        ({"devices": {"/dev/nvidia-uvm": Device("c", 509, 0)}}, "restart_needed", "is c 509:0, on the host c 511:0"),
        ({"devices": {"/dev/nvidia-uvm": None}}, "restart_needed", "runs without /dev/nvidia-uvm"),
        ({"devices": {"/dev/nvidia0": Device("file")}}, "plain_file", "pct exec 129 -- rm /dev/nvidia0"),
        (
            {"libraries": ("550.54.14",), "linked": ""},
            "library_mismatch",
            "are 550.54.14, the host's kernel module is 580",
        ),
        # An older one may lie beside it; what counts is where the link leads.
        ({"libraries": ("550.54.14", "580.159.04"), "linked": "550.54.14"}, "library_mismatch", "Install 580.159.04"),
        ({"libraries": (), "linked": "", "has_library": False}, "no_library", "version 580.159.04"),
    ],
)
def test_a_running_container(view: dict[str, Any], found: str, says: str) -> None:
    (finding,) = check(host(), [guest(*BOUND, inside=inside(**view))])
    assert finding.code == found
    assert says in finding.msg


@pytest.mark.parametrize(
    "view",
    [
        {},
        {"libraries": ("550.54.14", "580.159.04")},
        {"libraries": ("550.54.14", "580.159.04"), "linked": ""},
        {"libraries": (), "linked": "", "has_library": True},
    ],
)
def test_a_running_container_that_is_well(view: dict[str, Any]) -> None:
    assert check(host(), [guest(*BOUND, inside=inside(**view))]) == []


def test_libraries_are_not_judged_without_a_module() -> None:
    assert check(host(version=""), [guest(*BOUND, inside=inside(libraries=("550.54.14",)))]) == []


def test_one_gpu_for_two() -> None:
    first, second = guest(*BOUND, inside=inside()), guest(*PASSED, vmid=130)
    findings = check(host(), [first, second])
    assert [(f.code, f.vmid, f.severity) for f in findings] == [
        ("shared_gpu", 129, "warning"),
        ("shared_gpu", 130, "warning"),
    ]
    assert "containers 129 (llm), 130 (llm), of which 129 run" in findings[0].msg


RULE = st.builds(
    "lxc.cgroup{}.devices.{}: c {}:* rwm".format,
    st.sampled_from(["", "2"]),
    st.sampled_from(["allow", "allow", "deny"]),
    st.sampled_from([195, 237, 238, 400, 509, 511]),
)
MOUNT = st.builds(
    "lxc.mount.entry: {} {} none bind,optional,create=file".format,
    st.sampled_from([*NODES, "/dev/nvidia9", "/dev/nvidia-caps/nvidia-cap1"]),
    st.sampled_from(["dev/nvidia0", "/dev/nvidia0", "dev/nvidiactl", "dev/nvidia-uvm"]),
)
DEV = st.builds("dev{}: {}".format, st.integers(0, 3), st.sampled_from([*NODES, "/dev/nvidia9"]))


@given(st.lists(st.one_of(RULE, MOUNT, DEV), max_size=8))
def test_mending_ends_and_leaves_nothing_that_it_could_mend(lines: list[str]) -> None:
    before = guest(*dict.fromkeys(lines))
    text, done = mended(host(), before)
    conf = parse_conf(text)
    after = GuestView(129, conf, handed(conf), None)
    left = [finding for finding in check_guest(host(), after) if finding.fixable]
    # A rule that denies behind all others cannot be mended by one more that allows before it.
    if not any(rule.current and not rule.allow for rule in after.handed.rules):
        assert left == []
    assert mended(host(), after)[0] == text or left
    assert bool(done) == (text != "".join(line + "\n" for line in before.conf.lines)) or left
