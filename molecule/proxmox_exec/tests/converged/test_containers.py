# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Every container runs, and has its file, made without anything of the hypervisor's environment."""

from __future__ import annotations

from testinfra.host import Host

testinfra_hosts = ["lab://ct101", "lab://ct102", "lab://ct103", "lab://ct104"]


def test_it_is_up(host: Host) -> None:
    assert host.service("dbus").is_running


def test_its_file_tells_its_own_environment(host: Host) -> None:
    names = {line.partition("=")[0] for line in host.file("/root/it's $HOME; all").content_string.splitlines()}
    assert "PATH" in names
    assert not {name for name in names if name.startswith(("SSH_", "XDG_", "LC_"))}
