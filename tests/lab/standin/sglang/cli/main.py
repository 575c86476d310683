# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""`sglang serve ...` and `python -m sglang.cli.main serve ...`."""

from __future__ import annotations

import argparse

from sglang.version import __version__


def serve(arguments):
    """Serve a language model; `--model-type` other than llm or auto is not stood in for."""
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    rest, kind = [], "auto"
    words = iter(arguments)
    for word in words:
        if word == "--model-type":
            kind = next(words, None)
            if kind is None:
                raise ValueError("Error: --model-type requires a value.")
        elif word.startswith("--model-type="):
            kind = word.split("=", 1)[1]
        else:
            rest.append(word)
    if kind not in ("auto", "llm"):
        raise ValueError(f"the stand-in serves language models only, not {kind}")
    if rest and not rest[0].startswith("-"):
        rest = ["--model-path", *rest]
    run_server(prepare_server_args(rest))


def main():
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="subcommand", required=True)
    commands.add_parser("serve", help="Launch an SGLang server.", add_help=False)
    commands.add_parser("version", help="Show the version information.")
    known, rest = parser.parse_known_args()
    if known.subcommand == "serve":
        serve(rest)
    else:
        print(f"sglang version: {__version__}")


if __name__ == "__main__":
    main()
