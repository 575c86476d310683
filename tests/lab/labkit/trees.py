# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The file trees: one Debian 13 tree for all hypervisors and guests, and one Debian 12 tree for guests with SGLang."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from .place import HERE, INSIDE, LabError, Place, run

PACKAGES = "lxc uidmap mmdebstrap iproute2 openssh-client procps gcc libc6-dev"
# In the tree: what a hypervisor has, what a guest with a server has, and what people type there.
TREE_PACKAGES = (
    "systemd systemd-sysv dbus python3 python3-setproctitle openssh-server lxc uidmap iproute2 procps psmisc curl"
    " util-linux ca-certificates"
)
GUEST_PACKAGES = "systemd systemd-sysv dbus python3 iproute2 procps psmisc curl ca-certificates"
# Not needed in a container; each would cost start-up time in a hundred of them.
MASKED = (
    "lxc.service lxc-net.service lxc-monitord.service systemd-modules-load.service sys-kernel-debug.mount"
    " console-getty.service apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer systemd-pstore.service"
    " systemd-logind.service systemd-remount-fs.service e2scrub_all.timer motd-news.timer fstrim.timer"
)
TREE_VERSION = 2  # raise it when build() changes what it leaves
LIBRARY_FOLDER = "usr/lib/x86_64-linux-gnu"


def install_packages() -> None:
    """What the lab needs of the machine."""
    known = subprocess.run(
        ["dpkg-query", "--show", "--showformat=${Package} ${db:Status-Status}\n", *PACKAGES.split()],
        capture_output=True,
        text=True,
        check=False,
    )
    there = {line.split()[0] for line in known.stdout.splitlines() if line.endswith(" installed")}
    missing = [package for package in PACKAGES.split() if package not in there]
    if not missing:
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "update", "-qq"], env=environment)
    run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing], env=environment)


def missing_commands() -> list[str]:
    return [name for name in ("lxc-start", "mmdebstrap", "ip", "ssh", "newuidmap") if shutil.which(name) is None]


def build(place: Place, suite: str = "trixie", folder: str = "rootfs", packages: str = TREE_PACKAGES) -> bool:
    """Build a tree unless it is there; whether it was built. A complete tree has its recipe's text in `.done`."""
    tree = place.folder / folder
    recipe = f"{suite} {packages} {MASKED} {TREE_VERSION}\n"
    done = tree / ".done"
    if done.exists() and done.read_text(encoding="utf-8") == recipe:
        return False
    remove_tree(tree)
    place.folder.mkdir(parents=True, exist_ok=True)
    unread = ("doc", "man", "locale", "info", "bash-completion")
    place.run_inside(
        [
            "mmdebstrap",
            "--quiet",
            "--variant=minbase",
            '--aptopt=Acquire::Languages "none"',
            '--aptopt=APT::Install-Recommends "false"',
            *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in unread),
            f"--include={','.join(packages.split())}",
            suite,
            f"{INSIDE}/{folder}",
        ],
        network=False,
    )
    for unit in MASKED.split():
        link(tree / "etc/systemd/system" / unit, "/dev/null")
    (tree / "etc/hostname").unlink(missing_ok=True)
    (tree / "etc/machine-id").write_text("", encoding="utf-8")  # each container gets its own at its first boot
    (tree / "etc/resolv.conf").unlink(missing_ok=True)
    (tree / "etc/resolv.conf").touch()  # a look-up fails at once, rather than after a name server's silence
    for name in ("subuid", "subgid"):
        (tree / "etc" / name).write_text("root:100000:65536\n", encoding="utf-8")
    done.write_text(recipe, encoding="utf-8")
    return True


def bake(place: Place) -> None:
    """Put the lab's own files into the trees; cheap, done by each `up`, so that an edited stand-in counts at once."""
    tree = place.rootfs
    for name, mode in (("lab-host", 0o755), ("lab-guests", 0o755)):
        install(HERE / "hypervisor" / name, tree / "usr/local/sbin" / name, mode)
    install(HERE / "pct" / "pct", tree / "usr/sbin/pct", 0o755)
    install(HERE / "hypervisor/sshd.conf", tree / "etc/ssh/sshd_config.d/lab.conf")
    install(HERE / "hypervisor/only-on-hypervisors.conf", tree / "etc/systemd/system/ssh.service.d/lab.conf")
    for unit in ("lab-host.service", "lab-guests.service"):
        install(HERE / "hypervisor" / unit, tree / "etc/systemd/system" / unit)
        link(tree / "etc/systemd/system/multi-user.target.wants" / unit, f"../{unit}")
    install_standin(tree)
    library = build_nvml(place)
    for base in bases(place):
        install(HERE / "hypervisor/journald.conf", base / "etc/systemd/journald.conf.d/lab.conf")
        install(HERE / "hypervisor/lab-ready.service", base / "etc/systemd/system/lab-ready.service")
        link(base / "etc/systemd/system/multi-user.target.wants/lab-ready.service", "../lab-ready.service")
        if library:
            install(library, base / LIBRARY_FOLDER / "libnvidia-ml.so.1", 0o755)


def install_standin(tree: Path) -> None:
    """The stand-in sglang, where guests with the real one have that: /opt/sglang/bin/python, and a model."""
    source, target = HERE / "standin", tree / "opt/sglang"
    if target.exists():
        remove_tree(target)
    if not source.is_dir():
        return
    version = max((tree / "usr/lib").glob("python3.*")).name
    packages = target / "lib" / version / "site-packages"
    shutil.copytree(source / "sglang", packages / "sglang", ignore=shutil.ignore_patterns("__pycache__"))
    (target / "bin").mkdir()
    for name in ("python", "python3"):
        link(target / "bin" / name, "/usr/bin/python3")
    settings = "home = /usr/bin\ninclude-system-site-packages = true\n"  # setproctitle is the system's
    (target / "pyvenv.cfg").write_text(settings, encoding="ascii")
    model = target / "models/tiny/config.json"
    model.parent.mkdir(parents=True)
    model.write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}\n', encoding="ascii")


def bases(place: Place) -> list[Path]:
    return [tree for tree in (place.rootfs, place.folder / "rootfs-sglang") if (tree / ".done").exists()]


def build_nvml(place: Place) -> Path | None:
    """The stand-in libnvidia-ml, compiled when its source is there."""
    source = HERE / "nvml" / "fake_nvml.c"
    if not source.exists():
        return None
    library = place.folder / "libnvidia-ml.so.1"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        soname = "-Wl,-soname,libnvidia-ml.so.1"
        run(["gcc", "-shared", "-fPIC", "-O2", soname, "-o", str(library), str(source), "-ldl", "-lpthread"])
    return library


def host_key(place: Place) -> str:
    """The public ssh host key of all hypervisors; made when the tree was built."""
    kind, key = (place.rootfs / "etc/ssh/ssh_host_ed25519_key.pub").read_text(encoding="ascii").split()[:2]
    return f"{kind} {key}"


def openable_devices(count: int) -> list[tuple[int, int]]:
    """Device numbers to stand for GPUs: character devices that open here, that nobody uses, each with its own number.

    Virtual console screens and CPU id registers: nothing happens when they are opened and held. Major 195 cannot be had
    without the driver.
    """
    candidates = [(7, base + n) for n in (0, 1) for base in (0, 64, 128)]
    candidates += [(203, n) for n in range(max(2, os.cpu_count() or 2))]
    candidates += [(7, base + n) for n in range(2, 8) for base in (0, 64, 128)] + [(202, 0), (202, 1)]
    found = [numbers for numbers in candidates if opens(numbers)]
    if len(found) < count:
        raise LabError(f"this machine has {len(found)} devices that can stand for GPUs, {count} are wanted")
    return sorted(found[:count])


def control_devices() -> list[tuple[int, int]]:
    """For nvidiactl and nvidia-uvm."""
    found = [numbers for numbers in ((10, 234), (10, 237), (10, 200), (10, 229), (1, 7)) if opens(numbers)]
    if len(found) < 2:
        raise LabError("this machine has no devices that can stand for nvidiactl and nvidia-uvm")
    return found[:2]


def opens(numbers: tuple[int, int]) -> bool:
    with tempfile.TemporaryDirectory(prefix="cslab-") as folder:
        node = os.path.join(folder, "node")
        os.mknod(node, stat.S_IFCHR | 0o600, os.makedev(*numbers))
        try:
            os.close(os.open(node, os.O_RDWR | os.O_NONBLOCK))
        except OSError:
            return False
        return True


def install(source: Path, target: Path, mode: int = 0o644) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(target.name + ".new")
    shutil.copyfile(source, draft)
    draft.chmod(mode)
    draft.replace(target)


def link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.symlink_to(target)


def remove_tree(tree: Path) -> None:
    """Remove a folder of ours; a mount under it (there is none outside the lab's own namespace) stops that."""
    if not tree.exists():
        return
    with open("/proc/self/mountinfo", encoding="utf-8") as mounts:
        if any(line.split()[4].startswith(f"{tree}/") for line in mounts):
            raise LabError(f"something is mounted under {tree}")
    shutil.rmtree(tree)
