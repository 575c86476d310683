# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Configurations of containers: what counts, what is a snapshot, and edits that touch nothing else."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from ansible_collections.cleanslate.inference.plugins.module_utils.pct.conf import Edit, edited, parse_conf

FILES = Path(__file__).parent / "pve/nodes/pve1/lxc"


def conf(name: str):
    return parse_conf((FILES / name).read_text(encoding="utf-8"))


def test_what_counts_ends_at_the_first_snapshot() -> None:
    read = conf("129.conf")
    assert read.keys["hostname"] == "llm"
    assert read.tags == ["gpu", "llm"]
    assert read.snapshots == ("before-upgrade",)
    assert not read.pending
    assert [line.value.split()[0] for line in read.raw_values("lxc.mount.entry")] == [
        "/dev/nvidia0",
        "/dev/nvidia1",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/srv/models",
    ]


def test_pending_changes_do_not_count() -> None:
    read = conf("130.conf")
    assert read.keys["hostname"] == "embed.example.net"
    assert "dev3" not in read.keys
    assert read.pending
    assert read.snapshots == ()
    assert (read.lock, read.unprivileged) == ("backup", True)


def test_names() -> None:
    assert conf("129.conf").name(129) == "llm"
    assert conf("131.conf").name(131) == "CT131"


def test_raw_lines_may_have_an_equals_sign_and_the_last_of_equal_keys_counts() -> None:
    read = parse_conf("lxc.mount.entry = /a b none bind\ncores: 1\ncores:  2 \nnot a line\n")
    assert [(line.key, line.value) for line in read.raw] == [("lxc.mount.entry", "/a b none bind")]
    assert read.keys == {"cores": "2"}


def test_edits_stay_before_the_snapshots() -> None:
    read = conf("129.conf")
    text = edited(read, [Edit(None, "lxc.cgroup2.devices.allow: c 7:* rwm"), Edit(None, "dev0: /dev/x")])
    head, gap, tail = text.partition("\n\n[before-upgrade]\n")
    assert gap
    assert head.split("\n")[-2:] == ["lxc.cgroup2.devices.allow: c 7:* rwm", "dev0: /dev/x"]
    assert tail == (FILES / "129.conf").read_text(encoding="utf-8").partition("[before-upgrade]\n")[2]


def test_edits_replace_and_remove_single_lines() -> None:
    read = parse_conf("a: 1\nb: 2\nc: 3")
    assert edited(read, [Edit(1, "b: 5"), Edit(2, None), Edit(1, "too late")]) == "a: 1\nb: 5\n"


LINE = st.one_of(
    st.sampled_from(
        [
            "[snap]",
            "[pve:pending]",
            "[]",
            "",
            "  ",
            "#note",
            "hostname: x",
            "dev0: /dev/nvidia0",
            "dev0:",
            "lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind",
            "lxc.cgroup2.devices.allow = c 195:* rwm",
            "lxc.:",
        ]
    ),
    st.text(max_size=30).filter(lambda text: "\n" not in text),
)


@given(
    st.lists(LINE, max_size=12), st.lists(st.tuples(st.integers(0, 11), st.none() | st.just("cores: 9")), max_size=3)
)
def test_whatever_a_file_holds(lines: list[str], changes: list[tuple[int, str | None]]) -> None:
    """Nothing raises; no edit is the same text; an edit changes its line, and nothing behind the first section."""
    text = "".join(line + "\n" for line in lines)
    read = parse_conf(text)
    assert list(read.lines) == lines
    assert edited(read, []) == text
    assert all(raw.index < read.end for raw in read.raw)
    edits = [Edit(index, new) for index, new in changes if index < read.end]
    expected: list[str | None] = list(lines)
    for edit in reversed(edits):  # the first one for a line counts
        expected[edit.index] = edit.new
    assert edited(read, edits) == "".join(f"{line}\n" for line in expected if line is not None)
