# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Make ``ansible_collections.cleanslate.inference`` importable from a checkout in any folder."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# The committed symlink below .collections leads back to the root of the checkout. ansible-test brings its own
# importer for ansible_collections, which goes first.
COLLECTIONS = Path(__file__).resolve().parents[2] / ".collections"


def _importable() -> bool:
    try:
        return importlib.util.find_spec("ansible_collections.cleanslate.inference") is not None
    except ModuleNotFoundError:
        return False


if not _importable():
    sys.path.insert(0, str(COLLECTIONS))
