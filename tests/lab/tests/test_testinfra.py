# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The testinfra backend: what it reaches, and that its words arrive as they are."""

from __future__ import annotations

import pytest
import testinfra
import testinfra_lab  # noqa: F401  makes lab:// known
from labkit.client import Lab


def test_hosts_and_groups(lab: Lab) -> None:
    assert testinfra.get_host("lab://px1").run("hostname").stdout == "px1\n"
    assert testinfra.get_host("lab://ct103").run("hostname").stdout == "ct103\n"
    names = [host.backend.get_hostname() for host in testinfra.get_hosts(["lab://gpu_nodes"])]
    assert names == [guest.name for guest in lab.host.guests if guest.starts]


def test_words_codes_and_modules(lab: Lab) -> None:
    guest = testinfra.get_host("lab://ct102")
    done = guest.run("printf '%%s' %s; echo oops >&2; exit 3", "100% it's $x")
    assert (done.rc, done.stdout, done.stderr) == (3, "100% it's $x", "oops\n")
    assert guest.service("dbus").is_running
    assert guest.file("/etc/hosts").contains("ct102")


def test_a_stopped_guest_is_an_error(lab: Lab) -> None:
    with pytest.raises(RuntimeError, match="not running"):
        testinfra.get_host("lab://ct104").run("true")
