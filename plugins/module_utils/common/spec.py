# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Pieces of argument specs that several modules share; documented by the doc fragments of the same names."""

from __future__ import annotations

import typing as t

#: doc fragment cleanslate.inference.paths
PATHS_SPEC: dict[str, t.Any] = {
    "state_dir": {"type": "path", "default": "/var/lib/cleanslate"},
    "run_dir": {"type": "path", "default": "/run/cleanslate"},
}

#: doc fragment cleanslate.inference.scan
SCAN_SPEC: dict[str, t.Any] = {
    "users": {"type": "list", "elements": "str", "default": []},
    "dev_dir": {"type": "path", "default": "/dev"},
    "devices": {"type": "list", "elements": "str", "default": []},
    "containers": {"type": "list", "elements": "str", "default": []},
    "protect": {"type": "list", "elements": "str", "default": []},
    "pynvml_path": {"type": "path", "default": "/var/lib/cleanslate/lib"},
    "nvml_timeout": {"type": "float"},
}

#: doc fragment cleanslate.inference.lease
LEASE_SPEC: dict[str, t.Any] = {
    "lease": {"type": "str"},
    "lock_timeout": {"type": "float", "default": 0.0},
}
