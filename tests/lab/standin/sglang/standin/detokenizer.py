# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The detokenizer process: hands on what the scheduler says. Holds the nodes, uses no GPU."""

from __future__ import annotations

import signal

from sglang.standin import gpus, log, processes
from sglang.standin.bus import Inbox, Outbox


def run(cfg, paths, ready):
    processes.die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    processes.set_title("sglang::detokenizer")
    log.configure("", cfg["log_level"])
    nodes = gpus.Nodes()
    if cfg["device"] != "cpu":
        nodes.note(listed=False, mib=1)
        nodes.hold()
    inbox, tokenizer = Inbox(paths["detokenizer"]), Outbox(paths["tokenizer"])
    ready.send({})
    while True:
        tokenizer.put(**inbox.take())
