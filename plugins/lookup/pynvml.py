# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
name: pynvml
short_description: Path of the control node's nvidia-ml-py
version_added: 1.0.0
author:
  - Contributors to the cleanslate.inference collection (!UNKNOWN)
description:
  - nvidia-ml-py, the binding of NVIDIA's management library, is one file of pure Python. A node without pip or network
    can be given the control node's.
options: {}
"""

EXAMPLES = r"""
- name: Give the node the binding
  ansible.builtin.copy:
    src: "{{ lookup('cleanslate.inference.pynvml') }}"
    dest: /var/lib/cleanslate/lib/
    mode: "0644"
"""

RETURN = r"""
_raw:
  description: The path of C(pynvml.py) on the control node.
  type: list
  elements: path
"""

import importlib.util
import sys
from typing import Any

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase


class LookupModule(LookupBase):
    """Finds the file; loads nothing."""

    def run(self, terms: list[Any], variables: Any = None, **kwargs: Any) -> list[str]:
        spec = importlib.util.find_spec("pynvml")
        # The package that was called pynvml before keeps more than one file; only nvidia-ml-py is this one.
        if spec is None or not spec.origin or not spec.origin.endswith("pynvml.py"):
            raise AnsibleLookupError(
                "The Python of this control node (%s) has no pynvml.py to give to nodes without one. "
                "Install it here: %s -m pip install nvidia-ml-py" % (sys.executable, sys.executable)
            )
        return [spec.origin]
