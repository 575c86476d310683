# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
# Private to this collection: no stable interface.
"""A container's configuration, C(/etc/pve/lxc/VMID.conf): its keys, its raw C(lxc.*) lines, and where it ends.

Facts (pve-container, PVE/LXC/Config.pm, parse_pct_config and write_pct_config): one C(key: value) a line, the last one
of equal keys counts; raw keys begin with C(lxc.), may repeat, and may be written with C(=); lines that begin with C(#)
are the notes; everything from the first C([section]) on is a snapshot or what is pending, and configures nothing now.
"""

from __future__ import annotations

import dataclasses
import re
import typing as t

_SECTION = re.compile(r"\[(pve:pending|[A-Za-z][A-Za-z0-9_-]+)\]\s*", re.ASCII)
_RAW = re.compile(r"(lxc\.[a-z0-9_.-]+)(?::|\s*=)\s*(.*?)\s*", re.ASCII | re.DOTALL)
_KEY = re.compile(r"([a-z][a-z_]*[0-9]*):\s*(.+?)\s*", re.ASCII | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class RawLine:
    """One C(lxc.*) line; C(index) is its place in the file's lines, from 0."""

    index: int
    key: str
    value: str


@dataclasses.dataclass(frozen=True)
class GuestConf:
    """What counts now. C(lines) are those of the whole file, C(end) is the index of the first section's line."""

    lines: tuple[str, ...]
    end: int
    keys: t.Mapping[str, str]
    #: Where each key stands.
    places: t.Mapping[str, int]
    raw: tuple[RawLine, ...]
    snapshots: tuple[str, ...]
    #: Whether changes wait for the next start.
    pending: bool

    def name(self, vmid: int) -> str:
        """Its host name; Proxmox VE itself calls one without a name C(CT) and its id."""
        return self.keys.get("hostname") or "CT%d" % vmid

    @property
    def tags(self) -> list[str]:
        """Its tags; Proxmox VE takes semicolons, commas and spaces between them."""
        return sorted({tag for tag in re.split(r"[;,\s]+", self.keys.get("tags", "")) if tag})

    @property
    def lock(self) -> str:
        """Why Proxmox VE has it locked (C(backup), C(migrate), ...); empty when it is not."""
        return self.keys.get("lock", "")

    @property
    def unprivileged(self) -> bool:
        return self.keys.get("unprivileged") == "1"

    @property
    def template(self) -> bool:
        return self.keys.get("template") == "1"

    def raw_values(self, key: str) -> list[RawLine]:
        return [line for line in self.raw if line.key == key]


def parse_conf(text: str) -> GuestConf:
    """Read a configuration. Never fails: a line that is none is passed over, as Proxmox VE does with a warning."""
    lines = tuple(text.split("\n"))
    if lines and lines[-1] == "":
        lines = lines[:-1]
    keys: dict[str, str] = {}
    places: dict[str, int] = {}
    raw: list[RawLine] = []
    sections: list[str] = []
    end = len(lines)
    for index, line in enumerate(lines):
        section = _SECTION.fullmatch(line)
        if section:
            sections.append(section.group(1))
            end = min(end, index)
        if sections or line.startswith("#"):
            continue
        match = _RAW.fullmatch(line)
        if match:
            raw.append(RawLine(index, match.group(1), match.group(2)))
            continue
        match = _KEY.fullmatch(line)
        if match:
            keys[match.group(1)] = match.group(2)
            places[match.group(1)] = index
    snapshots = tuple(name for name in sections if name != "pve:pending")
    return GuestConf(lines, end, keys, places, tuple(raw), snapshots, len(snapshots) < len(sections))


@dataclasses.dataclass(frozen=True)
class Edit:
    """A change of one line: C(index) None adds C(new) behind the last line that counts, C(new) None removes."""

    index: int | None
    new: str | None


def edited(conf: GuestConf, edits: t.Iterable[Edit]) -> str:
    """The text with the edits made. Of two for one line the first counts; what follows the first section stays."""
    by_index: dict[int, str | None] = {}
    added: list[str] = []
    for edit in edits:
        if edit.index is None:
            if edit.new is not None and edit.new not in added:
                added.append(edit.new)
        else:
            by_index.setdefault(edit.index, edit.new)
    head: list[str] = []
    for index, line in enumerate(conf.lines[: conf.end]):
        new = by_index.get(index, line)
        if new is not None:
            head.append(new)
    tail = list(conf.lines[conf.end :])
    # Sections are set off by an empty line, which is theirs.
    gap: list[str] = []
    while tail and head and not head[-1].strip():
        gap.append(head.pop())
    return "".join(line + "\n" for line in head + added + gap[::-1] + tail)
