# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""Plain text tables for people: aligned, cut to the terminal, nothing unprintable."""

from __future__ import annotations

import shutil
import textwrap
import typing as t

from ansible_collections.cleanslate.inference.plugins.module_utils.common.text import show

MIN_LAST_COLUMN = 24
COMMAND_WIDTH = 44


def table(headers: t.Sequence[str], rows: t.Iterable[t.Sequence[t.Any]], width: int | None = None) -> list[str]:
    """Lines of a table. The last column is the one that wraps; columns that are empty in every row are left out.

    C(width) is in characters; default: the terminal's, at least 80, at most 160.
    """
    body = [["" if cell is None else show(str(cell)) for cell in row] for row in rows]
    keep = [i for i in range(len(headers)) if any(row[i] for row in body)] or [0]
    heads = [headers[i] for i in keep]
    body = [[row[i] for i in keep] for row in body]
    width = width or min(160, max(80, shutil.get_terminal_size((120, 24)).columns))
    sizes = [max(len(head), *(len(row[i]) for row in body)) if body else len(head) for i, head in enumerate(heads)]
    room = max(MIN_LAST_COLUMN, width - sum(sizes[:-1]) - 2 * len(sizes[:-1]))
    sizes[-1] = min(sizes[-1], room)
    lines = [_line(heads, sizes), _line(["-" * size for size in sizes], sizes)]
    for row in body:
        wrapped = textwrap.wrap(row[-1], room, break_long_words=True, break_on_hyphens=False) or [""]
        lines.append(_line([*row[:-1], wrapped[0]], sizes))
        lines.extend(_line([""] * (len(row) - 1) + [more], sizes) for more in wrapped[1:])
    return lines


def _line(cells: t.Sequence[str], sizes: t.Sequence[int]) -> str:
    return "  ".join(cell.ljust(size) for cell, size in zip(cells, sizes, strict=True)).rstrip()


def process_rows(rows: t.Iterable[dict[str, t.Any]], action: str | None = None) -> list[list[str]]:
    """Cells of processes as gpu_info, gpu_teardown and server_plan return them."""
    out = []
    for row in rows:
        where = row.get("container") or row.get("unit") or ""
        if isinstance(where, dict):
            where = "%s %s" % (where.get("kind", ""), where.get("id", ""))
        out.append(
            [
                action or str(row.get("decision") or ""),
                str(row.get("pid", "")),
                str(row.get("user") or ""),
                short_command(row),
                ",".join(ranges(row["gpus"])) if "gpus" in row else short_devices(row.get("devices") or []),
                str(where),
                ": ".join(str(text) for text in (row.get("reason"), row.get("detail")) if text),
            ]
        )
    return out


def short_command(row: dict[str, t.Any]) -> str:
    """The command line without the folders of its program, cut; the bare name where there is none."""
    line = str(row.get("cmdline") or row.get("comm") or "")
    program, space, rest = line.partition(" ")
    line = program.rsplit("/", 1)[-1] + space + rest
    return line if len(line) <= COMMAND_WIDTH else line[: COMMAND_WIDTH - 1] + "…"


PROCESS_HEADERS = ("", "pid", "user", "process", "GPUs", "in", "why")


def short_devices(devices: t.Iterable[t.Any]) -> str:
    """C(nvidia0, nvidia1, nvidia2, nvidiactl) as C(0-2): control nodes say nothing about a GPU."""
    numbers, others = set(), []
    for device in devices:
        name = str(device).rsplit("/", 1)[-1]
        number = name.removeprefix("nvidia")
        if number.isdigit():
            numbers.add(int(number))
        elif name not in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"):
            others.append(name)
    return ",".join([*ranges(sorted(numbers)), *sorted(others)])


def ranges(numbers: list[int]) -> list[str]:
    """C([0, 1, 2, 7]) as C(["0-2", "7"]); the numbers ascend."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return [str(first) if first == last else "%d-%d" % (first, last) for first, last in spans]
