# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The command line of the lab."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time

from . import faults, inventory, machine, trees
from .faults import Target
from .fleet import Hypervisor, make_fleet
from .place import LabError, Place


def main(argv: list[str]) -> int:
    # A lab that is being built must not stay half-built: what ends the program is an exception like any other.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    options = parser().parse_args(argv)
    try:
        if os.geteuid() != 0:
            raise LabError("the lab needs root")
        return options.run(Place(), options) or 0
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="lab", description="A fleet of hypervisors with GPU guests (see README.md).")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.set_defaults(run=run)
        return made

    def size(made: argparse.ArgumentParser) -> None:
        made.add_argument("hypervisors", type=int)
        made.add_argument("guests", type=int, help="guests of each hypervisor")
        made.add_argument("gpus", type=int, help="GPUs of each hypervisor")
        made.add_argument("--share", action="store_true", help="every guest gets all GPUs of its hypervisor")
        made.add_argument("--sglang", action="store_true", help="each hypervisor's first guest has the real SGLang")

    command("deps", do_deps, "install what the lab needs of the machine")
    command("rootfs", do_rootfs, "build the common file tree")
    size(command("up", do_up, "start a fleet"))
    made = command("with", do_with, "start a fleet, run a command in its network, end the fleet")
    size(made)
    made.add_argument("words", nargs="+", metavar="CMD")
    command("status", do_status, "show the fleet")
    command("inventory", do_inventory, "write inventories/lab")
    made = command("run", do_run, "run a command in the lab's network")
    made.add_argument("words", nargs=argparse.REMAINDER, metavar="CMD")
    made = command("ssh", do_ssh, "a command or a shell on a hypervisor, or in a guest")
    made.add_argument("host")
    made.add_argument("words", nargs=argparse.REMAINDER, metavar="CMD")
    kinds = "\n".join(f"  {kind:16} {text}" for kind, (_, text) in faults.KINDS.items())
    made = command("break", do_break, "break something, or mend it")
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    made.epilog = f"kinds:\n{kinds}"
    made.add_argument("kind", choices=list(faults.KINDS), metavar="KIND")
    made.add_argument("target", help="px1, or ct101")
    command("down", do_down, "end everything; the file tree stays")
    command("clean", do_clean, "down, and remove the lab's folder")
    return top


def do_deps(place: Place, options: argparse.Namespace) -> None:
    trees.install_packages()


def do_rootfs(place: Place, options: argparse.Namespace) -> None:
    with place.lock():
        need_commands()
        trees.build(place)


def do_up(place: Place, options: argparse.Namespace) -> None:
    with place.lock():
        bring_up(place, options)


def do_with(place: Place, options: argparse.Namespace) -> int:
    try:
        do_up(place, options)
        # Without the lock: the command may break things.
        return subprocess.run(in_network(place, options.words), check=False).returncode
    finally:
        with place.lock():
            machine.down(place)


def bring_up(place: Place, options: argparse.Namespace) -> None:
    begun = time.monotonic()
    need_commands()
    try:
        fleet = make_fleet(options.hypervisors, options.guests, options.gpus, options.share, options.sglang)
    except ValueError as error:
        raise LabError(str(error)) from None
    if options.sglang and not (place.folder / "sglang" / ".done").exists():
        raise LabError("the real SGLang is not built (tests/lab/sglang_cpu/build)")
    trees.build(place)
    try:
        machine.up(place, fleet)
    except BaseException:
        machine.down(place)
        raise
    inventory.write(place, fleet)
    guests = sum(len(host.guests) for host in fleet)
    print(f"{len(fleet)} hypervisors, {guests} guests in {time.monotonic() - begun:.1f} s")


def need_commands() -> None:
    missing = trees.missing_commands()
    if missing:
        raise LabError(f"missing on this machine: {', '.join(missing)} (lab deps)")


def do_status(place: Place, options: argparse.Namespace) -> None:
    row = "{:6} {:13} {:6} {:13} {:9} {:8} {}"
    print(row.format("HOST", "ADDRESS", "GUEST", "KIND", "STATE", "GPUS", "LOCK"))
    for host in machine.the_fleet(place):
        states = guest_states(place, host)
        state = "down" if states is None else "up"
        print(row.format(host.name, host.address, "", "hypervisor", state, host.gpus, "").rstrip())
        for guest in host.guests:
            state, lock = (states or {}).get(str(guest.vmid), ("-", ""))
            gpus = ",".join(map(str, guest.gpus))
            print(row.format("", guest.address, guest.name, guest.kind, state, gpus, lock).rstrip())


def guest_states(place: Place, host: Hypervisor) -> dict[str, tuple[str, str]] | None:
    """What the hypervisor's `pct list` says by guest id: state and lock. None when it does not answer."""
    done = machine.ssh(place, host, ["pct", "list"], stdin=subprocess.DEVNULL, capture_output=True)
    if done.returncode != 0:
        return None
    return {line[:10].strip(): (line[11:21].strip(), line[22:34].strip()) for line in done.stdout.splitlines()[1:]}


def do_inventory(place: Place, options: argparse.Namespace) -> None:
    print(inventory.write(place, machine.the_fleet(place)))


def do_run(place: Place, options: argparse.Namespace) -> None:
    machine.the_fleet(place)
    argv = in_network(place, options.words or ["bash"])
    os.execvp(argv[0], argv)


def in_network(place: Place, words: list[str]) -> list[str]:
    return ["ip", "netns", "exec", place.netns, *words]


def do_ssh(place: Place, options: argparse.Namespace) -> None:
    target = Target(place, options.host)
    words = list(options.words)
    if target.is_guest:
        inner = words or ["bash", "-l"]
        words = ["pct", "exec", str(target.guest.vmid), "--keep-env", "0", "--", *inner]
        words = [shlex.join(words)]
    terminal = ["-t"] if sys.stdin.isatty() and not options.words else []
    argv = in_network(place, [*place.ssh(target.host.address), *terminal, *words])
    os.execvp(argv[0], argv)


def do_break(place: Place, options: argparse.Namespace) -> None:
    with place.lock():
        faults.break_(place, options.kind, options.target)


def do_down(place: Place, options: argparse.Namespace) -> None:
    if not place.folder.exists():
        return
    with place.lock():
        machine.down(place)
    shutil.rmtree(inventory.folder(place), ignore_errors=True)


def do_clean(place: Place, options: argparse.Namespace) -> None:
    do_down(place, options)
    if place.folder.exists():
        trees.remove_tree(place.folder)
