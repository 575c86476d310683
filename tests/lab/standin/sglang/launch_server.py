# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""`python -m sglang.launch_server`: the older entry point, still supported."""

from __future__ import annotations

import sys
import warnings

from sglang.srt.server_args import prepare_server_args


def run_server(server_args):
    """Resolve the arguments and serve until told to stop."""
    server_args.resolve_once()
    from sglang.standin import engine

    engine.serve(server_args)


if __name__ == "__main__":
    warnings.warn(
        "'python -m sglang.launch_server' is still supported, but 'sglang serve' is the recommended entrypoint.\n"
        "  Example: sglang serve --model-path <model> [options]",
        UserWarning,
        stacklevel=1,
    )
    run_server(prepare_server_args(sys.argv[1:]))
