# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What cannot be meant is an error that names the option, before a signal is sent or a unit stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.survey import SurveyOptions, Surveyor
from ansible_collections.cleanslate.inference.plugins.module_utils.proc.table import ProcFS
from ansible_collections.cleanslate.inference.plugins.module_utils.teardown.run import Seams, tear_down

from ..proctree import ProcTree
from .fakes import Scene

NAN, FOREVER = float("nan"), float("inf")
#: Each of them alone, beside what a good call says.
WRONG: dict[str, list[Any]] = {
    "scope": [None, "", "everything", "instances"],
    "instances": [[""], ["../x"], ["a b"], ["x" * 64], ["-x"], ["a\n"]],
    "units": [[""], ["*"], ["a b"], ["a/b.service"], ["-.slice"], ["init.scope"], ["session-3.scope"]]
    + [["user@1000.service"], ["systemd-logind.service"], ["multi-user.target"], ["-.mount"], ["-x"]],
    "match": [[""], [" "], ["*"], [".*"], ["?"], ["."], ["1"], ["bash"], ["python3"], ["systemd"]]
    + [[1], [None], [True], [[]], [{}], [{"pid": 1}], [{"module": ""}], [{"module": "*"}], [{"script": "/"}]]
    + [[{"exe": "server"}], [{"exe": "/usr/bin/python3"}], [{"exe": "/sbin/init"}], [{"title": "*"}]]
    + [[{"module": "a", "title": "b"}], [{"module": "a", "args": "b"}], [{"title": "a", "args": ["b"]}]],
    "ports": [[0], [-1], [65536], ["http"]],
    "term_timeout": [-1.0, NAN, FOREVER],
    "kill_timeout": [0.0, -1.0, 10.0, NAN, FOREVER],
    "devices": [["99"], [""], ["-1"], ["all"], ["GPU-nothing"], ["/dev/nvidia0"]],
    "users": [["no-such-user-here"], [""], ["-1"], ["99999999999"]],
    "containers": [["404"], [""], ["*"], ["lxc/404"]],
    "protect": [[""], [" "], ["*"], ["exporter-*"], ["/"]],
    "dev_dir": ["/no/such/folder", "/etc/passwd", ""],
    "nvml_timeout": [0.0, -1.0, NAN, FOREVER],
    "lock_timeout": [-1.0, NAN],
    "run_dir": ["relative", "/proc/self/no"],
    "state_dir": ["relative", "/etc/passwd"],
}


@pytest.mark.parametrize(
    ("option", "value"),
    [pytest.param(option, value, id="%s=%r" % (option, value)) for option, values in WRONG.items() for value in values],
)
def test_what_cannot_be_meant_names_its_option_and_ends_nobody(tmp_path: Path, option: str, value: Any) -> None:
    tree = ProcTree(tmp_path / "machine", gpus=2)
    tree.add(500, argv=["sglang::scheduler"], maps=[tree.gpu(0)], cgroup="/system.slice/llm.service")
    scene = Scene(tree)
    scene.systemd.unit("llm.service", [500], main_pid=500, cgroup="/system.slice/llm.service")
    seams = Seams(
        surveyor=lambda options: Surveyor(
            options, fs=ProcFS(str(tree.proc)), nvml=tree.nvml, self_pid=0, stat=tree.stat, simulated=True
        ),
        kernel=lambda surveyor: scene.kernel,
        systemd=scene.systemd,
        clock=scene.clock,
        reader=scene.reader,
    )
    good = {
        **{name: [] for name in ("instances", "units", "match", "ports")},
        **SurveyOptions(dev_dir=str(tree.dev), state_dir=str(tree.state)).__dict__,
        "scope": "match",
        "term_timeout": 10.0,
        "kill_timeout": 60.0,
        "run_dir": str(tmp_path / "run"),
        "lease": None,
        "lock_timeout": 0.0,
    }
    # The lock is not waited for in check mode.
    for check in (False,) if option in ("lock_timeout", "run_dir") else (True, False):
        with pytest.raises(CleanslateError) as caught:
            tear_down({**good, option: value}, check, seams)
        assert caught.value.message.startswith(option + ":"), caught.value.message
        assert caught.value.message.isprintable()
    assert scene.kernel.signalled == set()
    assert scene.systemd.stopped == []
    assert tear_down(good, False, seams)["changed"]
