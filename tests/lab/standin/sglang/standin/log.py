# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How the server writes: its own lines, tqdm's bars, NCCL's lines. Log and bars go to stderr, NCCL to stdout."""

from __future__ import annotations

import logging
import os
import re
import socket
import sys

from sglang.standin.pace import wait

NCCL_SILENT = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", "NCCL_CONF_FILE")


def nccl_kinds():
    """Kind of each variable that NCCL knows; it ignores other names without a word."""
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "nccl.txt"), encoding="utf-8") as table:
        return dict(line.split() for line in table if not line.startswith("#"))


def configure(prefix, level):
    """Lines of this process begin with `[time prefix]`."""
    logging.basicConfig(
        level=getattr(logging, level.upper(), logging.INFO),
        format=f"[%(asctime)s{prefix}] %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        force=True,
    )


def bar(label, total, seconds, unit="it"):
    """A tqdm bar: redrawn with carriage returns, one newline at its end."""
    updates = min(total, 4)
    for i in range(updates + 1):
        done = total * i // updates
        tenth = 10 * done // total
        text = f"{label(done)}{100 * done // total:3d}%|{'█' * tenth}{' ' * (10 - tenth)}| {done}/{total} "
        sys.stderr.write(f"\r{text}[00:00<00:00, {'?' if not done else f'{done / max(seconds, 0.01):5.2f}'}{unit}/s]")
        sys.stderr.flush()
        if i < updates:
            wait(seconds / updates)
    sys.stderr.write("\n")
    sys.stderr.flush()


def shards(total, seconds):
    """The weight loader's bar has a form of its own."""
    for done in (0, total):
        percent = 100 * done // total
        rate = f"{total / max(seconds, 0.01):.2f}" if done else "?"
        sys.stderr.write(
            f"\rMulti-thread loading shards: {percent:3d}% Completed | {done}/{total} [00:00<00:00, {rate}it/s]"
        )
        sys.stderr.flush()
        if not done:
            wait(seconds)
    sys.stderr.write("\n")
    sys.stderr.flush()


def nccl(device, rank, ranks):
    """What NCCL says with NCCL_DEBUG=INFO: which variables the environment set. Nothing without a communicator."""
    if ranks < 2 or os.environ.get("NCCL_DEBUG", "").upper() not in ("INFO", "TRACE"):
        return
    subsystems = os.environ.get("NCCL_DEBUG_SUBSYS", "INIT,ENV").upper().split(",")
    head = f"{socket.gethostname()}:{os.getpid()}:{os.getpid()} [{device}] NCCL INFO"
    lines = ["NCCL version 2.30.7+cuda13.3"]
    if "INIT" in subsystems or "ALL" in subsystems:
        where = f"rank {rank} nranks {ranks} cudaDev {device} nvmlDev {device}"
        lines.append(f"ncclCommInitRank comm 0x32979b80 {where} - Init START")
    if "ENV" in subsystems or "ALL" in subsystems:
        kinds = nccl_kinds()
        for name in sorted(name for name in os.environ if name in kinds and name not in NCCL_SILENT):
            value, dot = os.environ[name], ""
            if kinds[name] == "integer":
                value, dot = as_c_integer(value), "."
            lines.append(f"{name} set by environment to {value}{dot}")
    sys.stdout.write("".join(f"{head} {line}\n" for line in lines))
    sys.stdout.flush()


def as_c_integer(text):
    """strtoll(text, NULL, 0): what follows the number is ignored."""
    match = re.match(r"\s*([+-]?)(0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)", text)
    if not match:
        return 0
    sign, digits = match.groups()
    base = 16 if digits[:2].lower() == "0x" else 8 if digits[0] == "0" and len(digits) > 1 else 10
    return int(digits, base) * (-1 if sign == "-" else 1)
