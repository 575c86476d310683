# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A failed result is short on the screen and whole in the report, whatever -v says."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from ansible import constants

from ansible_collections.cleanslate.inference.plugins.plugin_utils.shown import keep_whole, whole


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DEFAULT_LOCAL_TMP", str(tmp_path))


def test_what_was_cut_from_a_failed_result_comes_back(tmp_path: Path) -> None:
    result = {"failed": True, "msg": "busy", "holders": [{"pid": 7}], "exception": "trace", "invocation": {}}
    keep_whole("node/1", "cleanslate.inference.gpu_free", result)
    assert whole("node/1", "gpu_free", {"failed": True, "msg": "busy"}) == {
        "failed": True,
        "msg": "busy",
        "holders": [{"pid": 7}],
    }
    assert [stat.S_IMODE(os.stat(path).st_mode) for path in tmp_path.iterdir()] == [0o600]


def test_other_hosts_other_steps_and_good_results_are_themselves() -> None:
    keep_whole("a", "gpu_free", {"failed": True, "msg": "of a"})
    assert whole("b", "gpu_free", {"failed": True, "msg": "of b"})["msg"] == "of b"
    assert whole("a", "server_plan", {"failed": True, "msg": "plan"})["msg"] == "plan"
    assert whole("a", "gpu_free", {"changed": False, "invocation": 1}) == {"changed": False}
    assert whole("a", "gpu_free", "no result") == "no result"
