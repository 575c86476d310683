# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Looks at one model folder or file, and at every shard that its index names.

Runs as C(python3 -I -c SOURCE PATH WEIGHTS): a dead file server hangs whoever asks it, for ever and unkillably, so the
looking is done by a process that can be left behind. One JSON object goes out: C(missing) and C(config).
Standard library only, imports nothing of this collection.
"""

from __future__ import annotations

import json
import os
import sys
import typing as t

WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf", ".pth")


def look(path: str, weights: bool = True) -> dict[str, t.Any]:
    """What is missing, in words, and the model's own configuration (empty when it has none)."""
    path = os.path.expanduser(path)
    config: dict[str, t.Any] = {}
    if not os.path.exists(path):
        return {"missing": [path], "config": config}
    if not os.path.isdir(path):
        return {"missing": [], "config": config}
    missing: list[str] = []
    try:
        with open(os.path.join(path, "config.json"), encoding="utf-8") as handle:
            read = json.load(handle)
            config = read if isinstance(read, dict) else {}
    except FileNotFoundError:
        missing.append(os.path.join(path, "config.json"))
    except (OSError, ValueError):
        missing.append(os.path.join(path, "config.json") + " (cannot be read)")
    if weights:
        missing += missing_weights(path)
    return {"missing": missing, "config": config}


def missing_weights(path: str) -> list[str]:
    names = os.listdir(path)
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    if not indexes and not any(name.endswith(WEIGHTS) for name in names):
        return [os.path.join(path, "*.safetensors")]
    missing: list[str] = []
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
    return missing


if __name__ == "__main__":
    sys.stdout.write(json.dumps(look(sys.argv[1], sys.argv[2] == "yes")))
