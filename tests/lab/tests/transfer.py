# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Sends a file to a guest and fetches it, and prints this process's peak memory in KiB before and after.

transfer.py SOURCE BACK INVENTORY GUEST
"""

from __future__ import annotations

import os
import resource
import sys

from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader
from ansible.playbook.play_context import PlayContext
from ansible.plugins.loader import connection_loader, init_plugin_loader
from ansible.vars.manager import VariableManager


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(source: str, back: str, inventory: str, guest: str) -> None:
    init_plugin_loader()
    loader = DataLoader()
    known = InventoryManager(loader=loader, sources=[inventory])
    variables = VariableManager(loader=loader, inventory=known).get_vars(host=known.get_host(guest))
    connection = connection_loader.get("cleanslate.inference.pct", PlayContext())
    connection.set_options(var_options=variables)
    there = "/var/tmp/transferred"
    connection.exec_command("true")
    before = peak()
    try:
        connection.put_file(source, there)
        connection.fetch_file(there, back)
    finally:
        connection.exec_command(f"rm -f {there}")
    assert os.path.getsize(back) == os.path.getsize(source)
    print(before, peak())


main(*sys.argv[1:])
