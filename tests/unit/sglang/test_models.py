# Copyright: Contributors to the cleanslate.inference collection
# GNU General Public License v3.0 or later (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Models on disk: all of it there, or said what is missing, or said that the disk does not answer."""

from __future__ import annotations

import json

import pytest

from ansible_collections.cleanslate.inference.plugins.module_utils.sglang import models


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    shards = ["model-1-of-2.safetensors", "model-2-of-2.safetensors"]
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict(zip("ab", shards, strict=True))})
    )
    for shard in shards:
        (folder / shard).write_bytes(b"x")
    return folder


def test_a_whole_model(model):
    assert models.check(str(model), "model_path") == ([], {"max_position_embeddings": 4096})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("config.json", "config.json"),
        ("model-2-of-2.safetensors", "model-2-of-2.safetensors"),
    ],
)
def test_what_is_missing_is_named(model, name, said):
    (model / name).unlink()
    ((finding,), _config) = models.check(str(model), "model_path")
    assert (finding.code, finding.variable) == ("missing_path", "sglang_server_model_path")
    assert said in finding.msg


def test_an_empty_shard(model):
    (model / "model-1-of-2.safetensors").write_bytes(b"")
    assert "is empty" in models.check(str(model), "model_path")[0][0].msg


def test_an_index_that_cannot_be_read(model):
    (model / "model.safetensors.index.json").write_text("{")
    assert "cannot be read" in models.check(str(model), "model_path")[0][0].msg


def test_no_weights_at_all(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert "*.safetensors" in models.check(str(tmp_path), "model_path")[0][0].msg
    assert models.check(str(tmp_path), "model_path", weights=False)[0] == []


def test_no_folder(tmp_path):
    ((finding,), _config) = models.check(str(tmp_path / "nothing"), "speculative")
    assert finding.variable == "sglang_server_speculative"


def test_a_single_file(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"x")
    assert models.check(str(path), "model_path") == ([], {})


@pytest.mark.parametrize("name", ["meta-llama/Llama-3-8B", "", "model"])
def test_names_of_repositories_are_not_looked_for(name):
    assert models.check(name, "model_path") == ([], {})


def test_a_disk_that_does_not_answer_is_said_to_hang(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "source_of", lambda name: "import signal; signal.pause()")
    ((finding,), _config) = models.check(str(tmp_path), "model_path", timeout=0.3)
    assert finding.code == "path_hangs"


@pytest.mark.parametrize(
    ("target", "draft", "declared", "short"),
    [
        (4096, 2048, None, True),
        (4096, 4096, None, False),
        (4096, 2048, 2048, False),
        (4096, 2048, 3000, True),
        (None, 2048, None, False),
        (4096, None, None, False),
    ],
)
def test_contexts(target, draft, declared, short):
    def config(value):
        return {} if value is None else {"text_config": {"max_position_embeddings": value}}

    assert bool(models.compare_contexts(config(target), config(draft), declared)) is short
