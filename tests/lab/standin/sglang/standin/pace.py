# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Waiting: the stand-in imitates durations, so this is where it sleeps."""

from __future__ import annotations

import signal
import threading

_never = threading.Event()


def wait(seconds):
    """Wait; unlike time.sleep() it has a name that says why."""
    _never.wait(seconds)


def for_ever():
    """Hang until killed; signals with handlers are served."""
    while True:
        signal.pause()
