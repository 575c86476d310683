# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The stand-in's own settings: STANDIN_* variables. Read where they are needed, in every process of the server."""

from __future__ import annotations

import os


def text(name, default=""):
    return os.environ.get(f"STANDIN_{name}", default)


def number(name, default):
    return float(text(name) or default)


def paced(seconds):
    """Seconds of the pace at STANDIN_SPEED=1, in which a start takes about three seconds."""
    return seconds / number("SPEED", 1)


def dev_dir():
    return text("DEV_DIR", "/dev")


def shm_dir():
    return text("SHM_DIR", "/dev/shm")


def tmp_dir():
    return text("TMP_DIR", "/tmp")


def fault(phase):
    """How the start is to fail at this phase: None, error, oom, nccl, exit137 or hang (STANDIN_FAIL_AT=phase[:how])."""
    wanted, _, how = text("FAIL_AT").partition(":")
    return (how or "error") if wanted == phase else None


def wedged():
    """Whether generation hangs now: STANDIN_WEDGE=1, or the path of a file that says so while it exists."""
    value = text("WEDGE")
    return value == "1" or ("/" in value and os.path.exists(value))
