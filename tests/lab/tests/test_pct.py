# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The stand-in `pct` against the recorded contract of the real one (pve-container 6.1.10, lxc 6.0.4), row by row.

A row: what it shows, the line for the hypervisor's shell, the exit code, stdout and stderr as patterns for all of it.
`{privileged}` and the like are guests' ids.
"""

from __future__ import annotations

import re

import pytest
from labkit.client import Lab

ANY = r"(?s:.*)"
EMPTY = ""
GONE = r"Configuration file 'nodes/px1/lxc/999\.conf' does not exist\n"
REFUSED_ID = r"400 Parameter verification failed\.\n"
ATTACH = r"lxc-attach: \d+: \.\./src/lxc/attach\.c: lxc_attach_run_command: 1841 "

READING = [
    ("status of a running guest", "pct status {privileged}", 0, r"status: running\n", EMPTY),
    ("status of a stopped guest", "pct status {stopped}", 0, r"status: stopped\n", EMPTY),
    ("status of a locked guest", "pct status {locked}", 0, r"status: running\n", EMPTY),
    (
        "status in full: sorted, pid only while running",
        "pct status {privileged} --verbose",
        0,
        r"cpus: 2\ndisk: \d+\ndiskread: \d+\ndiskwrite: \d+\n"
        r"maxdisk: 8589934592\nmaxmem: 2147483648\nmaxswap: 536870912\n"
        r"mem: \d+\nname: ct101\nnetin: \d+\nnetout: \d+\npid: \d+\n(pressure\w+: \S+\n){6}status: running\nswap: \d+\n"
        r"type: lxc\nuptime: \d+\nvmid: 101\n",
        EMPTY,
    ),
    ("status in full of a locked guest", "pct status {locked} --verbose | grep ^lock", 0, r"lock: backup\n", EMPTY),
    ("no pid of a stopped guest", "pct status {stopped} --verbose | grep -c ^pid", 1, r"0\n", EMPTY),
    ("status of an unknown id", "pct status 999", 2, EMPTY, GONE),
    ("config of an unknown id", "pct config 999", 2, EMPTY, GONE),
    ("list has no arguments", "pct list 129", 2, EMPTY, r"400 too many arguments\n" + ANY),
    ("an id that is no number", "pct status abc", 2, EMPTY,
     REFUSED_ID + r"vmid: type check \('integer'\) failed - got 'abc'\npct status <vmid>" + ANY),
    ("an id with a leading zero", "pct status 0129", 2, EMPTY,
     REFUSED_ID + r"vmid: invalid format - value does not look like a valid VM ID\n" + ANY),
    ("snapshots of a guest without any", "pct listsnapshot {privileged}", 0, r"`-> current +You are here!\n", EMPTY),
    ("disk of a running guest", "pct df {privileged}", 0,
     r"MP +Volume +Size +Used +Avail +Use% Path\nrootfs +local:101/subvol-101-disk-0\.subvol +[\d.]+G .* /\n", EMPTY),
]  # fmt: skip

EXEC = [
    ("exit code 0", "pct exec {privileged} -- true", 0, EMPTY, EMPTY),
    ("exit code N", "pct exec {privileged} -- sh -c 'exit 7'", 7, EMPTY, EMPTY),
    ("killed by a signal", "pct exec {privileged} -- sh -c 'kill -9 $$'", 137, EMPTY, ANY),
    ("TERM", "pct exec {privileged} -- sh -c 'kill -15 $$'", 143, EMPTY, ANY),
    ("SEGV", "pct exec {privileged} -- sh -c 'kill -11 $$'", 139, EMPTY, ANY),
    ("INT", "pct exec {privileged} -- sh -c 'kill -2 $$'", 130, EMPTY, ANY),
    ("no such command", "pct exec {privileged} -- nosuch", 127, EMPTY,
     ATTACH + r'No such file or directory - Failed to exec "nosuch"\n'),
    ("not executable", "pct exec {privileged} -- /etc/passwd", 126, EMPTY,
     ATTACH + r'Permission denied - Failed to exec "/etc/passwd"\n'),
    ("a stopped guest", "pct exec {stopped} -- true", 255, EMPTY, r"container '104' not running!\n"),
    ("enter a stopped guest", "pct enter {stopped}", 255, EMPTY, r"container '104' not running!\n"),
    ("an unknown id", "pct exec 999 -- true", 2, EMPTY, GONE),
    ("enter an unknown id", "pct enter 999", 2, EMPTY, GONE),
    ("no command", "pct exec {privileged}", 255, EMPTY,
     r"missing command at /usr/share/perl5/PVE/CLI/pct\.pm line 246\.\n"),
    ("an option of the command without --", "pct exec {privileged} ls -la", 2, EMPTY,
     r"Unknown option: la\n400 unable to parse option\npct exec <vmid> \[<extra-args>\] \[OPTIONS\]\n"),
    ("a locked guest", "pct exec {locked} -- echo yes", 0, r"yes\n", EMPTY),
    ("arguments arrive as they are", "pct exec {privileged} -- printf '%s|' 'a b' '$x' '`id`' \"it's\" '' '*'", 0,
     re.escape("a b|$x|`id`|it's||*|"), EMPTY),
    ("root in both kinds", "pct exec {unprivileged} -- sh -c 'id -u; cat /proc/self/uid_map'", 0,
     r"0\n +0 +100000 +65536\n", EMPTY),
    ("stdin is the caller's", "echo in | pct exec {privileged} -- cat", 0, r"in\n", EMPTY),
    ("stdin of a loop is eaten",
     "printf '1\\n2\\n3\\n' | while read n; do echo $n; pct exec {privileged} -- cat >/dev/null; done", 0,
     r"1\n", EMPTY),
    ("no terminal unless the caller has one", "pct exec {privileged} -- tty", 1, r"not a tty\n", EMPTY),
    ("the host's environment leaks by default", "CUDA_VISIBLE_DEVICES=7 pct exec {privileged} -- env | sort", 0,
     r"CUDA_VISIBLE_DEVICES=7\n(?s:.*)SSH_CLIENT=(?s:.*)", EMPTY),
    ("PATH is forced", "PATH=/nowhere:$PATH pct exec {privileged} -- sh -c 'echo $PATH'", 0,
     r"/sbin:/bin:/usr/sbin:/usr/bin\n", EMPTY),
    ("certificate variables are dropped",
     "SSL_CERT_FILE=/x SSL_CERT_DIR=/y pct exec {privileged} -- env | grep -c SSL_CERT", 1, r"0\n", EMPTY),
    ("container and TERM are set", "pct exec {privileged} -- env | grep -E '^(container|TERM)=' | sort", 0,
     r"TERM=linux\ncontainer=lxc\n", EMPTY),
    ("--keep-env 0", "X=1 pct exec {privileged} --keep-env 0 -- env | sort", 0,
     r"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\nTERM=linux\ncontainer=lxc\n", EMPTY),
    ("--keep-env=0 before the id", "X=1 pct exec --keep-env=0 {privileged} -- env | grep -c X=", 1, r"0\n", EMPTY),
    ("--keep-env=1", "X=1 pct exec {privileged} --keep-env=1 -- env | grep X=", 0, r"X=1\n", EMPTY),
    ("cwd: the host's, where the guest has it", "cd /usr/share && pct exec {privileged} -- pwd", 0,
     r"/usr/share\n", EMPTY),
    ("cwd: / otherwise", "mkdir -p /only-here && cd /only-here && pct exec {privileged} -- pwd", 0, r"/\n", EMPTY),
    ("its cgroup is no unit's", "pct exec {privileged} -- grep ^0:: /proc/self/cgroup", 0, r"0::/\.lxc\n", EMPTY),
    ("attribution on the host",
     "pct exec {privileged} -- sleep 77 & until p=$(pgrep -xf 'sleep 77'); do sleep 0.1; done;"
     " grep ^0:: /proc/$p/cgroup; kill $p", 0, r"0::/lxc/101/ns/\.lxc\n", EMPTY),
]  # fmt: skip

REFUSED = [
    ("start an unknown id", "pct start 999", 255, EMPTY, GONE),
    ("start a running guest", "pct start {privileged}", 255, EMPTY, r"CT 101 already running\n"),
    ("stop an unknown id", "pct stop 999", 255, EMPTY, r"CT 999 not running\n"),
    ("stop a stopped guest", "pct stop {stopped}", 255, EMPTY, r"CT 104 not running\n"),
    ("shutdown an unknown id", "pct shutdown 999", 255, EMPTY, r"CT 999 not running\n"),
    ("shutdown a stopped guest", "pct shutdown {stopped}", 255, EMPTY, r"CT 104 not running\n"),
    ("reboot a stopped guest", "pct reboot {stopped}", 255, EMPTY, r"VM 104 not running\n"),
    ("start a locked guest", "pct start {locked}", 255, EMPTY, r"CT is locked \(backup\)\n"),
    ("stop a locked guest", "pct stop {locked}", 255, EMPTY, r"CT is locked \(backup\)\n"),
    ("shutdown a locked guest", "pct shutdown {locked}", 255, EMPTY, r"CT is locked \(backup\)\n"),
    ("set on a locked guest", "pct set {locked} --onboot 1", 255, EMPTY, r"CT is locked \(backup\)\n"),
    ("set a device that is not there", "pct set {stopped} --dev0 /dev/nosuch", 2, EMPTY,
     r"Device /dev/nosuch does not exist\n"),
    ("snapshot on a dir storage", "pct snapshot {privileged} one", 255, EMPTY, r"snapshot feature is not available\n"),
    ("not root", "setpriv --reuid 65534 --clear-groups pct list", 255, EMPTY, r"ipcc_send_rec" + ANY),
    ("push to a stopped guest", "pct push {stopped} /etc/hostname /root/h", 255, EMPTY,
     r"can only push files to a running CT\n"),
    ("pull from a stopped guest", "pct pull {stopped} /etc/hostname /root/h", 255, EMPTY,
     r"can only pull files from a running VM at /usr/share/perl5/PVE/CLI/pct\.pm line 664\.\n"),
]  # fmt: skip

FILES = [
    ("push", "echo x >/root/f; pct push {privileged} /root/f /root/g && pct exec {privileged} -- cat /root/g", 0,
     r"x\n", EMPTY),
    ("push into an unprivileged guest: owned by its root",
     "pct push {unprivileged} /etc/hostname /root/g; pct exec {unprivileged} -- stat -c %u:%g /root/g", 0,
     r"0:0\n", EMPTY),
    ("push with mode and owner",
     "pct push {privileged} /etc/hostname /root/g --perms 0640 --user mail --group 8;"
     " pct exec {privileged} -- stat -c %a:%U:%g /root/g", 0, r"640:mail:8\n", EMPTY),
    ("push of a missing file ends with 0", "pct push {privileged} /nosuch /root/g", 0, EMPTY,
     r"failed to open /nosuch for reading\n"),
    ("push into a missing folder ends with 0", "pct push {privileged} /etc/hostname /nosuchdir/h3", 0, EMPTY,
     r"failed to create file: /nosuchdir/h3: No such file or directory\n"),
    ("push for an unknown user ends with 0", "pct push {privileged} /etc/hostname /root/h --user x", 0, EMPTY,
     r"failed to get uid for: x\n"),
    ("pull",
     "pct exec {unprivileged} -- sh -c 'echo y >/root/f'; pct pull {unprivileged} /root/f /root/p; cat /root/p", 0,
     r"y\n", EMPTY),
    ("pull of a missing file ends with 0 and leaves an empty one",
     "rm -f /root/p; pct pull {privileged} /nosuch /root/p; echo $?; stat -c %s /root/p", 0, r"0\n0\n",
     r"failed to open /nosuch for reading\n"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "code", "stdout", "stderr"),
    [pytest.param(*row[1:], id=row[0]) for row in READING + EXEC + REFUSED + FILES],
)
def test_row(lab: Lab, line: str, code: int, stdout: str, stderr: str) -> None:
    done = lab.on_host(line)
    assert (done.returncode, bool(re.fullmatch(stdout, done.stdout)), bool(re.fullmatch(stderr, done.stderr))) == (
        code,
        True,
        True,
    ), done


def test_list(lab: Lab) -> None:
    row = "%-10s %-10s %-12s %-20s\n"
    expected = row % ("VMID", "Status", "Lock", "Name")
    for guest in lab.host.guests:
        name = "CT106" if guest.kind == "noname" else guest.name
        state = "running" if guest.starts else "stopped"
        expected += row % (guest.vmid, state, "backup" if guest.kind == "locked" else "", name)
    assert lab.on_host("pct list").stdout == expected


def test_list_says_nothing_without_guests(lab: Lab) -> None:
    hidden = "unshare -m sh -c 'mount -t tmpfs none /etc/pve/nodes && pct list; echo $?'"
    assert lab.on_host(hidden).stdout == "0\n"


def test_config_is_sorted_then_raw_lines_in_the_files_order(lab: Lab) -> None:
    lines = lab.on_host("pct config {unprivileged}").stdout.splitlines()
    keys = [line for line in lines if not line.startswith("lxc.")]
    raw = [line for line in lines if line.startswith("lxc.")]
    conf = lab.on_host("cat /etc/pve/lxc/{unprivileged}.conf").stdout.splitlines()
    assert lines == keys + raw
    assert keys == sorted(keys)
    assert raw == [line for line in conf if line.startswith("lxc.")]


def test_config_shows_the_description_encoded_and_snapshots_only_when_asked(lab: Lab) -> None:
    conf = "/etc/pve/lxc/{stopped}.conf"
    section = r"\n[snapA]\nmemory: 77\nparent: \nsnaptime: 1796000000\n"
    try:
        lab.on_host(f"cp {conf} /root/kept; (echo '#two%3A words'; cat /root/kept; printf '{section}') >{conf}")
        shown = lab.on_host("pct config {stopped}").stdout
        assert "description: two%3A words%0A\n" in shown
        assert "snapA" not in shown
        assert "memory: 77" not in shown
        assert "memory: 77" in lab.on_host("pct config {stopped} --snapshot snapA").stdout
        tree = lab.on_host("TZ=UTC pct listsnapshot {stopped}").stdout.splitlines()
        assert re.fullmatch(r"`-> snapA +20\d\d-\d\d-\d\d \d\d:\d\d:\d\d +no-description", tree[0])
        assert re.fullmatch(r" `-> current +You are here!", tree[1])
    finally:
        lab.on_host(f"mv /root/kept {conf}")


def test_a_guests_life(lab: Lab) -> None:
    def says(line: str) -> tuple[int, str, str]:
        done = lab.on_host(line)
        return done.returncode, done.stdout, done.stderr

    assert says("pct start {stopped}") == (0, "", "")
    try:
        assert says("pct status {stopped}") == (0, "status: running\n", "")
        first = lab.on_host("pct status {stopped} --verbose | grep ^pid").stdout
        assert says("pct reboot {stopped}") == (0, "", "")
        assert lab.on_host("pct status {stopped} --verbose | grep ^pid").stdout != first
        assert says("pct shutdown {stopped}") == (0, "", "")
        assert says("pct status {stopped}") == (0, "status: stopped\n", "")
        assert says("pct start {stopped}") == (0, "", "")
        assert says("pct stop {stopped}") == (0, "", "")
    finally:
        lab.on_host("pct stop {stopped}")
    assert says("pct status {stopped}") == (0, "status: stopped\n", "")


def test_skiplock_and_unlock(lab: Lab) -> None:
    try:
        assert lab.on_host("pct stop {locked} --skiplock").returncode == 0
        assert lab.on_host("pct start {locked}").stderr == "CT is locked (backup)\n"
        assert lab.on_host("pct start {locked} --skiplock").returncode == 0
        assert lab.on_host("pct unlock {locked}").returncode == 0
        assert (
            lab.on_host("pct set {locked} --memory 2049; pct config {locked} | grep ^memory").stdout == "memory: 2049\n"
        )
        assert lab.on_host("pct set {locked} --delete memory; pct config {locked} | grep -c ^memory").stdout == "0\n"
    finally:
        lab.on_host("pct set {locked} --memory 2048; echo 'lock: backup' >> /etc/pve/lxc/{locked}.conf")
        lab.on_host("pct start {locked} --skiplock")


def test_a_missing_passthrough_device_stops_the_start(lab: Lab) -> None:
    try:
        lab.on_host("echo 'dev0: /dev/nosuch' >> /etc/pve/lxc/{stopped}.conf")
        done = lab.on_host("pct start {stopped}")
        assert (done.returncode, done.stderr) == (255, "Device /dev/nosuch does not exist\n")
    finally:
        lab.on_host("pct set {stopped} --delete dev0")


def test_a_failed_start_shows_the_log_on_stdout(lab: Lab) -> None:
    conf = "/etc/pve/lxc/{stopped}.conf"
    try:
        lab.on_host(f"cp {conf} /root/kept; echo 'lxc.mount.entry: /nosuch srv/x none bind,create=dir' >> {conf}")
        done = lab.on_host("pct start {stopped}")
        assert done.returncode == 255
        assert done.stderr == "startup for container '104' failed\n"
        assert "No such file or directory" in done.stdout
    finally:
        lab.on_host(f"mv /root/kept {conf}")


def test_a_missing_node_of_an_optional_bind_mount_does_not(lab: Lab) -> None:
    conf = "/etc/pve/lxc/{stopped}.conf"
    try:
        lab.on_host(
            f"cp {conf} /root/kept; echo 'lxc.mount.entry: /dev/nosuch dev/x none bind,optional,create=file' >> {conf}"
        )
        assert lab.on_host("pct start {stopped}").returncode == 0
        assert lab.on_host("pct exec {stopped} -- test -c /dev/x").returncode == 1
    finally:
        lab.on_host(f"pct stop {{stopped}}; mv /root/kept {conf}")


def test_a_start_with_a_warning(lab: Lab) -> None:
    try:
        lab.on_host("echo 'warning = old systemd' > /etc/pct-standin.conf")
        done = lab.on_host("pct start {stopped}")
        assert (done.returncode, done.stdout, done.stderr) == (
            0,
            "WARN: old systemd\n",
            "Task finished with 1 warning(s)!\n",
        )
    finally:
        lab.on_host("rm -f /etc/pct-standin.conf; pct stop {stopped}")


def test_the_start_up_time_is_settable(lab: Lab) -> None:
    line = "s=$(date +%s%N); {} pct status {privileged}; e=$(date +%s%N); echo $(( (e - s) / 1000000 ))"
    try:
        by_environment = int(lab.on_host(line.replace("{}", "PCT_STARTUP=0.5")).stdout.split()[-1])
        lab.on_host("echo 'startup = 0.5' > /etc/pct-standin.conf")
        by_file = int(lab.on_host(line.replace("{}", "")).stdout.split()[-1])
    finally:
        lab.on_host("rm -f /etc/pct-standin.conf")
    assert by_environment >= 500
    assert by_file >= 500


def test_closing_stdin_breaks_pct_itself(lab: Lab) -> None:
    """The real one's script was file 0 then, and lxc-attach made it mode 0600."""
    try:
        lab.on_host("pct exec {privileged} -- true <&-")
        assert lab.on_host("pct list").stderr.endswith("Permission denied\n")
    finally:
        lab.on_host("chmod 755 /usr/sbin/pct")


def test_regular_files_as_stdin_and_stdout_become_0600(lab: Lab) -> None:
    lab.on_host("echo true >/root/i; chmod 644 /root/i; pct exec {privileged} -- sh </root/i >/root/o")
    assert lab.on_host("stat -c %a /root/i /root/o").stdout == "600\n600\n"


def test_killing_pct_exec_leaves_the_command_running(lab: Lab) -> None:
    begin = "pct exec {privileged} -- sleep 78 >/dev/null 2>&1 & until p=$(pgrep -xf 'sleep 78'); do sleep 0.1; done"
    try:
        lab.on_host(f"{begin}; kill -9 $!; wait")
        assert lab.on_host("pct exec {privileged} -- pgrep -xf 'sleep 78'").stdout.strip().isdigit()
    finally:
        lab.on_host("pct exec {privileged} -- pkill -xf 'sleep 78'")


def test_a_passthrough_node_is_another_inode_with_the_same_number(lab: Lab) -> None:
    """The reason why fuser on the hypervisor misses holders in such guests."""

    def node(line: str) -> tuple[str, str, str]:
        inode, number, mode = lab.on_host(line).stdout.split()
        return inode, number, mode

    gpu = next(guest.gpus[0] for guest in lab.host.guests if guest.kind == "passthrough")
    show = f"stat -c '%d/%i %t:%T %a' /dev/nvidia{gpu}"
    host, guest = node(show), node(f"pct exec {{passthrough}} -- {show}")
    assert host[0] != guest[0]
    assert host[1] == guest[1]
    assert guest[2] == "660"
    own = next(guest.gpus[0] for guest in lab.host.guests if guest.kind == "privileged")
    show = f"stat -c '%d/%i %t:%T %a' /dev/nvidia{own}"
    assert node(show)[:2] == node(f"pct exec {{privileged}} -- {show}")[:2]


def test_every_running_guest_can_open_its_gpus_and_no_other(lab: Lab) -> None:
    for guest in lab.host.guests:
        if not guest.starts:
            continue
        for gpu in guest.gpus:
            assert lab.on_host(f"pct exec {guest.vmid} -- sh -c ': <>/dev/nvidia{gpu}'").returncode == 0, (guest, gpu)
        names = lab.on_host(f"pct exec {guest.vmid} -- sh -c 'ls /dev/nvidia[0-9]*'").stdout.split()
        assert names == [f"/dev/nvidia{gpu}" for gpu in guest.gpus]
