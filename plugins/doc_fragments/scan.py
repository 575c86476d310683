# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations


class ModuleDocFragment:
    """How processes and GPUs are looked at (common/spec.py SCAN_SPEC)."""

    DOCUMENTATION = r"""
options:
  users:
    description:
      - Look only at processes of these users (names or ids). Empty means everybody.
      - On a real C(/dev) such a confined look can prove nothing, so the verdict is never V(free) but V(unknown).
    type: list
    elements: str
    default: []
  dev_dir:
    description:
      - Folder of the device nodes.
      - Outside C(/dev) plain files count as nodes, by inode, and every result says C(simulated).
    type: path
    default: /dev
  devices:
    description:
      - Only these GPUs, by NVML index, UUID or PCI bus id. Empty means all of the machine.
      - The NVML index is not the number in C(/dev/nvidiaN).
    type: list
    elements: str
    default: []
  containers:
    description:
      - On a hypervisor, the containers that are meant (ids). Empty means the host and all containers.
      - Holders of other containers are still seen and named; they are spared, and a GPU that they hold is not free.
    type: list
    elements: str
    default: []
  protect:
    description:
      - More program names to spare, beside the built-in list of daemons and display servers.
      - Whole names, never parts of one.
    type: list
    elements: str
    default: []
  pynvml_path:
    description:
      - Folder that holds C(pynvml.py) (package nvidia-ml-py), searched after the interpreter's own packages.
    type: path
    default: /var/lib/cleanslate/lib
  nvml_timeout:
    description:
      - Seconds that the driver may take to answer. Default 10 plus 3 for each GPU.
    type: float
"""
