# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A record is read as it was written, or refused: it decides which processes are ended."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import tempfile
import typing as t
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ansible_collections.cleanslate.inference.plugins.module_utils.common.errors import CleanslateError
from ansible_collections.cleanslate.inference.plugins.module_utils.state.record import (
    InstanceRecord,
    RecordStore,
    check_name,
)

Foreign = t.Callable[[Path], None]
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", fullmatch=True)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
)
RECORDS = st.builds(
    InstanceRecord,
    name=NAMES,
    backend=st.sampled_from(["systemd", "process"]),
    unit=st.text(),
    pid=st.integers(),
    start_time=st.integers(0),
    cgroup=st.text(),
    gpus=st.lists(st.text()),
    ports=st.lists(st.integers(0, 65535)),
    launched_at=st.floats(allow_nan=False) | st.integers(),
    simulated=st.booleans(),
    details=st.dictionaries(st.text(), JSON, max_size=3),
)


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    return RecordStore(str(tmp_path / "state"))


def path_of(store: RecordStore, name: str = "a") -> Path:
    return Path(store.path(name))


@given(RECORDS)
@settings(max_examples=25)
def test_a_record_comes_back_as_it_was(record: InstanceRecord) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        store = RecordStore(folder)
        assert store.save(record)
        assert store.load(record.name) == record
        assert not store.save(record)
        assert store.names() == [record.name]
        assert store.all() == [record]


def test_records_are_for_their_owner_alone(store: RecordStore) -> None:
    store.save(InstanceRecord("a", "systemd"))
    assert stat.S_IMODE(path_of(store).stat().st_mode) == 0o600
    assert stat.S_IMODE(Path(store.folder).stat().st_mode) == 0o700
    assert stat.S_IMODE(Path(store.folder).parent.stat().st_mode) == 0o755


def test_a_fresh_node_has_no_records_and_gets_no_folder(store: RecordStore) -> None:
    assert store.names() == []
    assert store.all() == []
    assert store.load("a") is None
    assert not store.forget("a")
    assert not os.path.exists(store.folder)


def test_a_record_is_forgotten_once(store: RecordStore) -> None:
    store.save(InstanceRecord("a", "systemd"))
    store.save(InstanceRecord("b", "process"))
    assert store.forget("a")
    assert not store.forget("a")
    assert store.names() == ["b"]


def test_what_is_no_record_by_its_name_is_left_alone(store: RecordStore) -> None:
    store.save(InstanceRecord("a", "systemd"))
    for name in (".cleanslate-x", ".json", "b.json.tmp", "-x.json", "a b.json", "x" * 64 + ".json"):
        (Path(store.folder) / name).write_bytes(b"rubbish")
    assert store.names() == ["a"]
    assert len(store.all()) == 1


GOOD = dict(dataclasses.asdict(InstanceRecord("a", "systemd", pid=5)), format=1)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"7",
        b'"x"',
        b"\xff\xfe",
        b"[" * 200_000,
        json.dumps(GOOD).encode()[:-20],
        *(json.dumps({k: v for k, v in GOOD.items() if k != gone}).encode() for gone in ("format", "name", "backend")),
        *(
            json.dumps({**GOOD, **change}).encode()
            for change in (
                {"unknown": 1},
                {"name": "b"},  # a copy: it would speak for another instance's processes
                {"pid": "5"},
                {"pid": True},
                {"pid": 5.5},
                {"pgrp": None},
                {"start_time": "9"},
                {"cgroup": None},
                {"cgroup": ["/"]},
                {"gpus": "GPU-1"},
                {"gpus": [1]},
                {"ports": ["30000"]},
                {"ports": [True]},
                {"ready_at": "yesterday"},
                {"simulated": 1},
                {"details": []},
                {"backend": 1},
            )
        ),
    ],
    ids=lambda content: content[:60].decode("ascii", "replace"),
)
def test_a_damaged_record_is_an_error_that_names_it(store: RecordStore, content: bytes) -> None:
    store.save(InstanceRecord("a", "systemd"))
    path_of(store).write_bytes(content)
    for ask in (lambda: store.load("a"), store.all):
        with pytest.raises(CleanslateError, match=r"instances/a\.json is damaged"):
            ask()


def test_a_record_of_another_version_is_left_to_that_version(store: RecordStore) -> None:
    store.save(InstanceRecord("a", "systemd"))
    path_of(store).write_text(json.dumps(dict(GOOD, format=2, new_field=1)))
    with pytest.raises(CleanslateError, match="another version"):
        store.load("a")


@pytest.mark.parametrize("name", ["", "/", "..", "a/b", "../a", "-a", ".a", "a b", "a\n", "ä", "a" * 64, "a\0", "a%i"])
def test_what_is_no_name_reaches_no_file(store: RecordStore, name: str) -> None:
    for ask in (store.path, store.load, store.forget, check_name, lambda n: store.save(InstanceRecord(n, "systemd"))):
        with pytest.raises(CleanslateError, match="instance") as error:
            ask(name)
        assert error.value.message.isprintable()
    assert not os.path.exists(store.folder)


@given(NAMES)
def test_names(name: str) -> None:
    assert check_name(name) == name


def test_planted_records_are_refused(store: RecordStore, foreign: Foreign, tmp_path: Path) -> None:
    store.save(InstanceRecord("a", "systemd"))
    path_of(store).rename(tmp_path / "elsewhere")
    path_of(store).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CleanslateError, match="symlink"):
        store.all()
    path_of(store).unlink()
    os.mkfifo(path_of(store))
    with pytest.raises(CleanslateError, match="no plain file"):
        store.all()
    store.save(InstanceRecord("a", "systemd"))
    foreign(path_of(store))
    with pytest.raises(CleanslateError, match="belongs to user"):
        store.all()


@pytest.mark.parametrize("which", ["state", "state/instances"])
def test_records_in_another_user_s_folder_are_refused(
    store: RecordStore, foreign: Foreign, tmp_path: Path, which: str
) -> None:
    store.save(InstanceRecord("a", "systemd"))
    foreign(tmp_path / which)
    record = InstanceRecord("a", "systemd", pid=7)
    for ask in (store.names, store.all, lambda: store.load("a"), lambda: store.save(record), lambda: store.forget("a")):
        with pytest.raises(CleanslateError, match=r"state_dir: .* belongs to user"):
            ask()


def test_records_in_a_folder_that_all_may_change_are_refused(store: RecordStore, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(0o777)
    with pytest.raises(CleanslateError, match="chmod go-w"):
        store.names()
    with pytest.raises(CleanslateError, match="chmod go-w"):
        store.save(InstanceRecord("a", "systemd"))
