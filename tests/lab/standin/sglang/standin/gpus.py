# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Device nodes: which ones there are, which are visible, and how SGLang's processes hold them.

Measured on H200 (SGLang 0.5.17): with CUDA_VISIBLE_DEVICES=1 main and detokenizer have 7 descriptors and 2 mappings of
nvidia1, the scheduler 23 and 3, and all of them 3 descriptors and no mapping of nvidia0, which they do not use. A GPU
that is visible but not used has 7 and 2. Two descriptors of nvidiactl, four of nvidia-uvm.
"""

from __future__ import annotations

import errno
import mmap
import os
import re

from sglang.standin import settings

UUID = "GPU-fa4e0000-0000-4000-8000-0000000000"


class Nodes:
    """The nvidia<minor> nodes of STANDIN_DEV_DIR."""

    def __init__(self):
        self.dir = settings.dev_dir()
        names = os.listdir(self.dir) if os.path.isdir(self.dir) else []
        minors = sorted(int(name[6:]) for name in names if re.fullmatch(r"nvidia\d+", name))
        order = [int(n) for n in os.environ.get("FAKE_NVML_ORDER", "").split(",") if n]
        self.minors = [m for m in order if m in minors] + [m for m in minors if m not in order]
        self.kept = []
        self.told = None

    def visible(self):
        """Minors in CUDA's order; CUDA ignores everything after the first name that it does not know."""
        value = os.environ.get("CUDA_VISIBLE_DEVICES")
        if value is None:
            return list(self.minors)
        base = os.environ.get("FAKE_NVML_UUID", UUID)
        found = []
        for word in value.split(","):
            word = word.strip()
            if re.fullmatch(r"\d+", word) and int(word) < len(self.minors):
                minor = self.minors[int(word)]
            else:
                named = [m for m in self.minors if len(word) > 4 and f"{base}{m:02x}".startswith(word)]
                named += [m for m in self.minors if re.fullmatch(rf"MIG-fa4e.*{m:02x}[0-9a-f]{{2}}", word)]
                if len(named) != 1:
                    break
                minor = named[0]
            found.append(minor)
        return found

    def _open(self, name, times, maps):
        path = os.path.join(self.dir, name)
        descriptor = None
        for _ in range(times - maps):  # each mapping of Python's keeps one more descriptor
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
            except FileNotFoundError:
                return
            self.kept.append(descriptor)
        for _ in range(maps):
            try:
                self.kept.append(mmap.mmap(descriptor, mmap.PAGESIZE))
            except OSError as error:
                # The character devices of the lab cannot be mapped.
                if error.errno not in (errno.ENODEV, errno.EINVAL, errno.EACCES):
                    raise
                return
            except ValueError:
                return  # a plain file smaller than a page

    def hold(self, used=None, mapping=True):
        """Hold all nodes, as the process that runs on minor `used`, or as one that uses none."""
        visible = self.visible()
        for minor in self.minors:
            descriptors, maps = (23, 3) if minor == used else (7, 2) if minor in visible else (3, 0)
            self._open(f"nvidia{minor}", descriptors if mapping else 1, maps if mapping else 0)
        if self.minors:
            self._open("nvidiactl", 2, 0)
            self._open("nvidia-uvm", 4, 0)

    def note(self, listed, mib, used=None):
        """Tell the stand-in NVML what this process is on the driver's side: see tests/lab/nvml/fake_nvml.c."""
        name = f"fake-gpu:listed={int(listed)},mib={int(mib)}"
        if used is not None:
            peers = "+".join(str(minor) for minor in self.visible() if minor != used)
            name += f",uses={used}" + (f",peers={peers}" if peers else "")
        former, self.told = self.told, os.memfd_create(name, os.MFD_CLOEXEC)
        if former is not None:
            os.close(former)
