# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Run the checks of the collection: all of them, or the stages and groups that are named."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from types import FrameType

from runner import Runner
from stage import Stage
from stages import STAGES


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/run", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="STAGE or GROUP")
    parser.add_argument("--list", action="store_true", help="name the stages and what each group holds")
    arguments = parser.parse_args()
    if arguments.list:
        for stage in STAGES:
            missing = ", ".join(reason for reason in (need() for need in stage.needs) if reason)
            print(f"{stage.group:<10} {stage.name:<22} {missing}".rstrip())
        return 0
    runner = Runner(strict=os.environ.get("CI", "").lower() in ("1", "true", "yes"))

    def stop(_number: int, _frame: FrameType | None) -> None:
        runner.stop()

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    return runner.run(chosen(arguments.names, parser))


def chosen(names: list[str], parser: argparse.ArgumentParser) -> list[Stage]:
    """The stages of these names and groups in the order of the table; all of them without a name."""
    known = {stage.name for stage in STAGES} | {stage.group for stage in STAGES}
    unknown = sorted(set(names) - known)
    if unknown:
        parser.error(f"no stage or group {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return [stage for stage in STAGES if not names or stage.name in names or stage.group in names]


if __name__ == "__main__":
    sys.exit(main())
