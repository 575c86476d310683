# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Asks an installed SGLang what it makes of a command line. Runs inside SGLang's own Python, as C(python -c SOURCE).

One JSON object comes in on stdin: C(what) (C(identity) or C(resolve)) and, for C(resolve), C(argv): the arguments
after the module's name. One JSON object goes out on stdout. Everything that SGLang itself prints goes to stderr.

Uses what every version from 0.5.17 on offers: C(prepare_server_args), and where they exist C(resolve_once),
C(check_server_args) and C(resolved_dict); until 0.5.20 or so the first one resolves as well (C(__post_init__)).
Standard library only, imports nothing of this collection.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import json
import os
import re
import sys
import traceback
import typing as t

# Rejections that depend on the GPU, which the probe does not see (CUDA_VISIBLE_DEVICES is empty while it runs).
ARCHITECTURE = re.compile(
    r"no cuda gpus? (?:are|is) available|cuda driver|cuda error|no accelerator|compute capability|\bsm_?\d{2,3}\b"
    r"|blackwell|hopper|ampere|device_capability|not compiled with cuda|no nvidia driver|gpu architecture"
    r"|invalid device id|get_device_properties",
    re.IGNORECASE,
)
# A model that is a repository's name and not here yet: only the download could tell.
OFFLINE = re.compile(r"offline mode|couldn't connect|cannot find the requested files|localentrynotfound", re.IGNORECASE)


def identity() -> dict[str, t.Any]:
    """Which SGLang this Python has, without importing it where its package says so."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not (spec.origin or spec.submodule_search_locations):
        return {"version": "", "location": ""}
    origin = spec.origin or next(iter(spec.submodule_search_locations or []))
    location = origin if os.path.isdir(origin) else os.path.dirname(origin)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found = importlib.metadata.distribution("sglang")
        if os.path.realpath(str(found.locate_file("sglang"))) == os.path.realpath(location):
            return {"version": found.version, "location": location}
    import sglang

    return {"version": str(getattr(sglang, "__version__", "")), "location": location}


def describe(error: BaseException) -> str:
    """An exception in one line: SGLang fails with bare AssertionErrors, so the failing source line is part of it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = ""
    if frames:
        last = frames[-1]
        where = " (%s:%s: %s)" % (os.path.basename(last.filename), last.lineno, last.line)
    text = " ".join(str(error).split())
    return "%s: %s%s" % (type(error).__name__, text, where) if text else type(error).__name__ + where


def judged(error: BaseException, message: str) -> bool:
    """Whether this rejection also holds on the machine's GPUs."""
    if ARCHITECTURE.search(message) or OFFLINE.search(message):
        return False
    return not any("torch/cuda" in frame.filename for frame in traceback.extract_tb(error.__traceback__))


def plain(value: t.Any) -> t.Any:
    """What JSON can carry of a resolved value."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return str(value)


def resolve(argv: list[str]) -> dict[str, t.Any]:
    """Parse, resolve and check one command line."""
    answer: dict[str, t.Any] = {"parsed": False, "resolved": None, "errors": [], "not_judged": []}

    def failed(stage: str, error: BaseException) -> dict[str, t.Any]:
        message = describe(error)
        if judged(error, message):
            answer["errors"].append({"stage": stage, "message": message})
        else:
            answer["not_judged"].append({"stage": stage, "message": message})
        return answer

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            from sglang.srt import server_args as module
    except Exception as error:  # noqa: BLE001  whatever SGLang raises is the answer
        return failed("import", error)
    try:
        with contextlib.redirect_stderr(said):
            args = module.prepare_server_args(argv)
    except SystemExit:
        lines = [line for line in said.getvalue().splitlines() if ": error: " in line]
        message = lines[-1].split(": error: ", 1)[1] if lines else said.getvalue().strip()[-500:]
        answer["errors"].append({"stage": "parse", "message": message})
        return answer
    except Exception as error:  # noqa: BLE001
        return failed("resolve", error)
    answer["parsed"] = True
    for stage, name in (("resolve", "resolve_once"), ("check", "check_server_args")):
        call = getattr(args, name, None)
        if call is None:
            continue
        try:
            call()
        except Exception as error:  # noqa: BLE001
            return failed(stage, error)
    try:
        values = args.resolved_dict() if hasattr(args, "resolved_dict") else vars(args)
    except Exception as error:  # noqa: BLE001
        return failed("check", error)
    answer["resolved"] = {str(key): plain(value) for key, value in values.items() if not str(key).startswith("_")}
    return answer


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.loads(sys.stdin.read())
    answer = identity()
    if request["what"] == "resolve":
        answer.update(resolve(request["argv"]))
    out.write(json.dumps(answer) + "\n")
    out.flush()
    # SGLang's imports leave threads behind that may hold the interpreter at its end.
    os._exit(0)


if __name__ == "__main__":
    main()
