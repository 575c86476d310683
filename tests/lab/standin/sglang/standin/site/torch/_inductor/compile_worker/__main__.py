# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The pool process of torch-inductor, as the stand-in imitates it: forks workers, holds the nodes, waits.

When its scheduler is gone the workers end at once and the pool a second later (measured: 0.1 s and 0.96 s), by which
time the scheduler itself has long freed the GPU.
"""

import argparse
import os
import select
import sys

parser = argparse.ArgumentParser()
for flag in ("pickler", "kind", "workers", "parent", "read-fd", "write-fd"):
    parser.add_argument(f"--{flag}")
options = parser.parse_args()

# sglang/standin/site/torch/_inductor/compile_worker/__main__.py: the package is six folders up.
package = os.path.abspath(__file__)
for _ in range(7):
    package = os.path.dirname(package)
sys.path[0] = package

from sglang.standin import settings  # noqa: E402
from sglang.standin.gpus import Nodes  # noqa: E402
from sglang.standin.pace import wait  # noqa: E402

nodes = Nodes()
nodes.note(listed=False, mib=0)
nodes.hold(mapping=False)

children = []
for _ in range(int(options.workers)):
    child = os.fork()
    if child == 0:
        children = None
        break
    children.append(child)

reading, answering = int(options.read_fd), int(options.write_fd)
if children is not None:
    os.write(answering, b"1")
os.close(answering)
closed = select.poll()
closed.register(reading, select.POLLIN | select.POLLHUP)
closed.poll()
if children is None:
    os._exit(0)
wait(settings.number("POOL_LINGER", 0.96))
for child in children:
    os.waitpid(child, 0)
