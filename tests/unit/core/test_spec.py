# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the doc fragments promise is what the modules take."""

from __future__ import annotations

import importlib
import typing as t

import pytest
import yaml

from ansible_collections.cleanslate.inference.plugins.module_utils.common import spec

FRAGMENTS = "ansible_collections.cleanslate.inference.plugins.doc_fragments."


@pytest.mark.parametrize(
    ("fragment", "options"), [("paths", spec.PATHS_SPEC), ("scan", spec.SCAN_SPEC), ("lease", spec.LEASE_SPEC)]
)
def test_fragment_and_spec_are_one(fragment: str, options: dict[str, t.Any]) -> None:
    module = importlib.import_module(FRAGMENTS + fragment)
    documented = yaml.safe_load(module.ModuleDocFragment.DOCUMENTATION)["options"]
    told = {name: {key: v for key, v in option.items() if key != "description"} for name, option in documented.items()}
    assert told == options
    assert all(option["description"] for option in documented.values())
