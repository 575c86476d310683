# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A teardown in a process of its own, confined to the processes that it is told.

Started as C(python driver.py JSON words…): further words change nothing but the command line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / ".collections"))

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.nvml import NvmlSnapshot
from ansible_collections.cleanslate.inference.plugins.module_utils.gpu.survey import SurveyOptions, Surveyor
from ansible_collections.cleanslate.inference.plugins.module_utils.teardown.run import Seams, tear_down


class Blind:
    child_pid = 0

    def snapshot(self) -> NvmlSnapshot:
        return NvmlSnapshot()

    def close(self) -> None:
        pass


def main() -> int:
    order = json.loads(sys.argv[1])

    def surveyor(options: SurveyOptions) -> Surveyor:
        return Surveyor(options, nvml=Blind(), pids=order["pids"])

    try:
        result = tear_down(order["params"], False, Seams(surveyor=surveyor))
    except CleanslateError as error:
        result = {"failed": True, "msg": error.message, **error.details}
    print(json.dumps(result), flush=True)
    return 1 if result.get("failed") else 0


if __name__ == "__main__":
    sys.exit(main())
