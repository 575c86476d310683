# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What all processes of the server do: die with their parent, carry a title, end the whole tree."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def die_with_parent():
    """SGLang: kill_itself_when_parent_died() in every worker."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def set_title(title):
    """Really setproctitle: it writes over the environment unless SPT_NOENV is set, as in the real server."""
    import setproctitle

    setproctitle.setproctitle(title)


def descendants(pid):
    """All live descendants of a process, children before grandchildren."""
    parents = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parents[int(name)] = int(file.read().rsplit(b")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = [pid]
    for ancestor in found:
        found += [child for child, parent in parents.items() if parent == ancestor]
    return found[1:]


def kill_tree(logger, include_self):
    """SGLang's kill_process_tree(): SIGKILL to every descendant, and to itself if asked."""
    logger.info(
        "kill_process_tree called: parent_pid=%d, include_parent=%s, pid=%d", os.getpid(), include_self, os.getpid()
    )
    for pid in descendants(os.getpid()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    if include_self:
        os.kill(os.getpid(), signal.SIGKILL)
