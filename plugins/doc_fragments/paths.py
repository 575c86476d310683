# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations


class ModuleDocFragment:
    """Where records and locks live (common/spec.py PATHS_SPEC)."""

    DOCUMENTATION = r"""
options:
  state_dir:
    description:
      - Folder of what must survive a reboot. The records of launched instances are in C(instances) below it.
      - An absolute path. The folder must belong to root or to the user that the module runs as, and nobody else may
        write to it, for its content decides which processes are ended; it is refused otherwise.
    type: path
    default: /var/lib/cleanslate
  run_dir:
    description:
      - Folder of locks and leases. The same is asked of it as of O(state_dir).
    type: path
    default: /run/cleanslate
"""
