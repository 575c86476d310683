# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every byte of a declaration through a real systemd: command line and environment as a process got them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from labkit.client import Lab

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / ".collections"))

from ansible_collections.cleanslate.inference.plugins.module_utils.sglang import systemd_backend as backend
from ansible_collections.cleanslate.inference.plugins.module_utils.sglang.account import Account
from ansible_collections.cleanslate.inference.plugins.module_utils.sglang.paths import Paths

INSTANCE = "quoting"
FOLDER = "/run/cleanslate-quoting"
HOSTILE = [
    "plain",
    "",
    "two words",
    " spaces at the ends ",
    'say "hello"',
    "it's",
    "back\\slash \\n \\x41 \\",
    "100%",
    "%n %i %% %",
    "$HOME ${HOME} $$ $",
    "`id`",
    ";",
    "#no comment",
    "a=b",
    "ü 漢字 🚀",
    '{"a": "b \\" c", "d": "%s $e"}',
    "tab\there",
    "-leading",
    "@+!:-|",
]
TELL = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open(%r, 'w'))" % (FOLDER + "/told.json")


def put(lab: Lab, path: str, content: str) -> None:
    done = lab.on_host("pct exec {privileged} -- tee %s >/dev/null" % path, content.encode())
    assert done.returncode == 0, done


def test_every_byte_arrives(lab: Lab) -> None:
    where = Paths(FOLDER, "", FOLDER + "/100% environment", "", "", "")
    environment = {"X%d" % number: value for number, value in enumerate(HOSTILE)}
    argv = ["/usr/bin/python3", "-c", TELL, *HOSTILE]
    unit = backend.unit_text(INSTANCE, argv, where, Account("root", 0, 0, "/root", False), 5.0)
    path = backend.unit_path(INSTANCE, "/run/systemd/system")
    try:
        assert lab.on_host("pct exec {privileged} -- mkdir -p %s" % FOLDER).returncode == 0
        put(lab, "'%s'" % where.environment, backend.environment_file(environment))
        put(lab, path, unit)
        started = lab.on_host(
            "pct exec {privileged} -- systemctl daemon-reload && pct exec {privileged} -- systemctl start %s"
            % backend.unit_name(INSTANCE)
        )
        assert started.returncode == 0, started
        ended = lab.on_host(
            "pct exec {privileged} -- timeout 20 sh -c 'until test -s %s/told.json; do sleep 0.1; done'" % FOLDER
        )
        assert ended.returncode == 0, lab.on_host(
            "pct exec {privileged} -- journalctl -n 20 -u %s" % backend.unit_name(INSTANCE)
        )
        words, found = json.loads(lab.on_host("pct exec {privileged} -- cat %s/told.json" % FOLDER).stdout)
        assert words == HOSTILE
        assert {name: found.get(name) for name in environment} == environment
    finally:
        lab.on_host("pct exec {privileged} -- rm -rf %s %s" % (FOLDER, path))
        lab.on_host("pct exec {privileged} -- systemctl daemon-reload")
