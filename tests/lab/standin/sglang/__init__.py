# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A stand-in for the package `sglang` 0.5.23: its command line, processes, log, HTTP interface, signals and litter.

It computes nothing. It stands for the real server where there is no GPU, or where the real one is too slow: the demo,
the fleet in the lab, tests. What is real about it: the flags (flags.json is made out of SGLang's own parser), argparse,
setproctitle, the processes and what they hold. tests/lab/standin/README.md says how to start it and which settings it
has; nothing under plugins/ may import it.
"""

from __future__ import annotations

from sglang.version import __version__

__all__ = ["__version__"]
