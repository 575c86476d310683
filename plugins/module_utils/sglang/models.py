# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Whether a declared model is there, whole. Every look happens in a child with a deadline: a dead NFS server hangs
whoever asks it, for ever and unkillably."""

from __future__ import annotations

import json
import subprocess
import sys
import typing as t

from ..common.text import show
from .findings import Finding, variable
from .sources import source_of

#: Seconds for one model.
TIMEOUT = 15.0


def is_local(path: str) -> bool:
    """A path, and not the name of a repository (C(meta-llama/Llama-3-8B)) to be downloaded."""
    return path.startswith(("/", "./", "../", "~"))


def look(path: str, weights: bool, timeout: float) -> dict[str, t.Any] | None:
    """One look by a child (model_look.py); None when it failed. Raises TimeoutError, and leaves the child behind."""
    child = subprocess.Popen(  # pylint: disable=ansible-bad-function
        [sys.executable, "-I", "-c", source_of("model_look"), path, "yes" if weights else "no"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
    )
    try:
        out, _err = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # One in an uninterruptible wait cannot be reaped now; it must not hold this process either.
        child.kill()
        child.poll()
        raise TimeoutError from None
    try:
        found = json.loads(out.decode("utf-8"))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def check(
    path: str, what: str, timeout: float = TIMEOUT, weights: bool = True
) -> tuple[list[Finding], dict[str, t.Any]]:
    """Findings about one declared path (C(what): the field that names it), and the model's configuration."""
    if not path or not is_local(path):
        return [], {}
    where = variable(what)
    try:
        found = look(path, weights, timeout)
    except TimeoutError:
        msg = "%s: %s did not answer within %.0f s. Is its file server reachable?" % (where, path, timeout)
        return [Finding("path_hangs", msg, where)], {}
    if found is None:
        return [Finding("missing_path", "%s: %s cannot be looked at." % (where, path), where)], {}
    missing = found["missing"]
    if not missing:
        return [], found["config"]
    shown = ", ".join(show(item) for item in missing[:5]) + (
        " and %d more" % (len(missing) - 5) if len(missing) > 5 else ""
    )
    return [Finding("missing_path", "%s: missing on this node: %s." % (where, shown), where)], found["config"]


def context_of(config: t.Mapping[str, t.Any]) -> int | None:
    """The longest context of a model by its configuration."""
    inner = config.get("text_config")
    value = config.get(
        "max_position_embeddings", inner.get("max_position_embeddings") if isinstance(inner, dict) else None
    )
    return value if isinstance(value, int) else None


def compare_contexts(target: t.Mapping[str, t.Any], draft: t.Mapping[str, t.Any], declared: t.Any) -> list[Finding]:
    """A draft model with a shorter context than the target crashes when a prompt passes its end (sglang issue 3574)."""
    short, long = context_of(draft), context_of(target)
    wanted = declared if isinstance(declared, int) else long
    if short is None or wanted is None or short >= wanted:
        return []
    where = variable("speculative")
    return [
        Finding(
            "speculative",
            "%s: the draft model's context is %d, the server's %d. Limit context_length to %d in %s, or take another "
            "draft model." % (where, short, wanted, short, variable("args")),
            where,
        )
    ]
