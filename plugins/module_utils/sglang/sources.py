# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""The source text of this package's programs that run in a process of their own.

A module travels to the node as a zip archive, so there is no file to run: the text is read through the importer.
Both are imported by name here, because that is how Ansible finds what to pack.
"""

from __future__ import annotations

import typing as t

from . import model_look, probe, supervise

_PROGRAMS: dict[str, t.Any] = {"model_look": model_look, "probe": probe, "supervise": supervise}


def source_of(name: str) -> str:
    """The text of C(model_look), C(probe) or C(supervise)."""
    module = _PROGRAMS[name]
    text = module.__spec__.loader.get_source(module.__name__)
    # Ansible's own importer, on the control node, answers with bytes.
    return text.decode("utf-8") if isinstance(text, bytes) else str(text)
