# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The options of ansible-core's own ssh connection, as the installed version has them.

Written out here they would age: a later core asks its options for names that an older list lacks.
"""

from __future__ import annotations

import typing as t

import yaml
from ansible.plugins.connection import ssh

# Transfers go through the guest's own cat, not through sftp or scp; the others are documented by the plugin itself.
_LEFT_OUT = {
    "host",
    "pipelining",
    "remote_user",
    "scp_executable",
    "scp_extra_args",
    "sftp_batch_mode",
    "sftp_executable",
    "sftp_extra_args",
    "ssh_transfer_method",
    "use_tty",
}


class ModuleDocFragment:
    """`extends_documentation_fragment: cleanslate.inference.ssh_options`."""


def _without_versions(value: t.Any) -> t.Any:
    """Core's own version numbers mean nothing in the documentation of another collection."""
    if isinstance(value, dict):
        return {key: _without_versions(item) for key, item in value.items() if key != "version_added"}
    if isinstance(value, list):
        return [_without_versions(item) for item in value]
    return value


def _documentation() -> str:
    options = yaml.safe_load(ssh.DOCUMENTATION)["options"]
    kept = {name: _without_versions(options[name]) for name in sorted(set(options) - _LEFT_OUT)}
    # Compression costs more than a network between a control node and its hypervisors; 64 MiB of random bytes, seconds.
    kept["ssh_args"]["default"] = kept["ssh_args"]["default"].removeprefix("-C ")
    return yaml.safe_dump({"options": kept})


# Outside the class: documentation linters read assignments inside it as text.
setattr(ModuleDocFragment, "DOCUMENTATION", _documentation())  # noqa: B010
