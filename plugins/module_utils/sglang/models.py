# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Whether a declared model is there, whole. Every look happens in a child with a deadline: a dead NFS server hangs
whoever asks it, for ever and unkillably."""

from __future__ import annotations

import json
import os
import select
import signal
import typing as t

from .findings import Finding, variable

#: Seconds for one model.
TIMEOUT = 15.0
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf", ".pth")


class Model(t.NamedTuple):
    """What a look found. C(config): the model's own configuration, empty when it has none."""

    missing: list[str]
    config: dict[str, t.Any]


def is_local(path: str) -> bool:
    """A path, and not the name of a repository (C(meta-llama/Llama-3-8B)) to be downloaded."""
    return path.startswith(("/", "./", "../", "~"))


def within(seconds: float, work: t.Callable[[], t.Any]) -> t.Any:
    """The JSON-able result of C(work), done in a child. Raises TimeoutError; the child is then left to the kernel."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read_end)
            with os.fdopen(write_end, "w") as out:
                out.write(json.dumps(work()))
            code = 0
        finally:
            os._exit(code)
    os.close(write_end)
    poller = select.poll()
    poller.register(read_end, select.POLLIN | select.POLLHUP)
    with os.fdopen(read_end, "rb") as answer:
        if not poller.poll(seconds * 1000):
            os.kill(pid, signal.SIGKILL)
            # A child in an uninterruptible wait cannot be reaped now; it must not hold this process either.
            os.waitpid(pid, os.WNOHANG)
            raise TimeoutError
        raw = answer.read()
    os.waitpid(pid, 0)
    return json.loads(raw.decode("utf-8")) if raw else None


def look(path: str, weights: bool = True) -> Model:
    """Look at one model folder or file, and at every shard that its index names."""
    path = os.path.expanduser(path)
    if not os.path.exists(path):
        return Model([path], {})
    if not os.path.isdir(path):
        return Model([], {})
    missing: list[str] = []
    config: dict[str, t.Any] = {}
    try:
        with open(os.path.join(path, "config.json"), encoding="utf-8") as handle:
            read = json.load(handle)
            config = read if isinstance(read, dict) else {}
    except FileNotFoundError:
        missing.append(os.path.join(path, "config.json"))
    except (OSError, ValueError):
        missing.append(os.path.join(path, "config.json") + " (cannot be read)")
    names = os.listdir(path)
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    if not weights:
        return Model(missing, config)
    for name in indexes:
        try:
            with open(os.path.join(path, name), encoding="utf-8") as handle:
                shards = sorted(set(json.load(handle)["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            missing.append(os.path.join(path, name) + " (cannot be read)")
            continue
        for shard in shards:
            full = os.path.join(path, str(shard))
            if not os.path.exists(full):
                missing.append(full)
            elif os.path.getsize(full) == 0:
                missing.append(full + " (is empty)")
    if not indexes and not any(name.endswith(_WEIGHTS) for name in names):
        missing.append(os.path.join(path, "*.safetensors"))
    return Model(missing, config)


def check(
    path: str, what: str, timeout: float = TIMEOUT, weights: bool = True
) -> tuple[list[Finding], dict[str, t.Any]]:
    """Findings about one declared path (C(what): the field that names it), and the model's configuration."""
    if not path or not is_local(path):
        return [], {}
    where = variable(what)
    try:
        found = within(timeout, lambda: look(path, weights)._asdict())
    except TimeoutError:
        msg = "%s: %s did not answer within %.0f s. Is its file server reachable?" % (where, path, timeout)
        return [Finding("path_hangs", msg, where)], {}
    if found is None:
        return [Finding("missing_path", "%s: %s cannot be looked at." % (where, path), where)], {}
    missing = found["missing"]
    if not missing:
        return [], found["config"]
    shown = ", ".join(missing[:5]) + (" and %d more" % (len(missing) - 5) if len(missing) > 5 else "")
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
