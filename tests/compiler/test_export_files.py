"""Model directories as they occur: shards, links, tied heads, missing weights, broken files."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from reference_forward import ReferenceForward
from safetensors.torch import load_file, save_file
from tiny_models import save_dir, tiny_dir, tiny_llama_dir, tiny_model

from dsc.bundle_schema.errors import ModelError
from dsc.compiler.export_hf import export_hf, export_state_dict


def _logits(exported):
    return ReferenceForward(exported)(np.arange(3, 15)[None])


@pytest.fixture(scope="module")
def expected():
    with torch.no_grad():
        return tiny_model("llama")(torch.arange(3, 15)[None]).logits.numpy()


def test_directory_with_its_tokenizer_and_facts(tmp_path, expected):
    directory = tiny_llama_dir(tmp_path / "plain")
    (directory / "README.md").write_text("---\nlicense: mit\n---\n", encoding="utf-8")
    exported = export_hf(directory)
    np.testing.assert_allclose(_logits(exported), expected, atol=1e-5)
    assert set(exported.tokenizer) == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert exported.tokenizer["tokenizer.json"] == (directory / "tokenizer.json").read_bytes()
    assert exported.source == "Hugging Face directory plain"
    info = exported.info
    assert (info.name, info.licence, info.eos_ids, info.bos_id, info.pad_id) == ("plain", "mit", (1,), 0, 2)
    assert (info.vocab_size, info.max_length, info.n_layers, info.n_heads) == (320, 512, 2, 4)
    assert info.n_parameters == sum(p.numel() for p in tiny_model("llama").parameters())


def test_shards_behind_links_from_another_folder(tmp_path, monkeypatch, expected):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    tiny_model("llama").save_pretrained(blobs, max_shard_size="100KB")
    assert len(list(blobs.glob("*.safetensors"))) > 1
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(os.path.relpath(file, snapshot))
    monkeypatch.chdir(tmp_path / "snapshots")
    from pathlib import Path

    np.testing.assert_allclose(_logits(export_hf(Path("abc"))), expected, atol=1e-5)


def test_tied_head_missing_from_the_file_is_the_embedding(tmp_path):
    model = tiny_model("llama", tie_word_embeddings=True)
    directory = save_dir(tmp_path, model)
    assert "lm_head.weight" not in load_file(directory / "model.safetensors")
    exported = export_hf(directory)
    with torch.no_grad():
        np.testing.assert_allclose(_logits(exported), model(torch.arange(3, 15)[None]).logits.numpy(), atol=1e-5)
    matrices = [name for name, value in exported.model.graph.initializers.items() if value.shape == [320, 64]]
    assert matrices == ["model.embed_tokens.weight"]


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("present", "n_stored"),
    [({HEAD: 0}, 1), ({EMBEDDING: 0}, 1), ({HEAD: 0, EMBEDDING: 0}, 1), ({HEAD: 1, EMBEDDING: 0}, 2), ({}, 0)],
    ids=["head alone", "embedding alone", "twice the same", "two that differ", "neither"],
)
def test_head_and_embedding_are_those_of_the_file_whatever_the_configuration_ties(tmp_path, present, n_stored):
    """Nothing is left at its initial value, and nothing that is in the file is dropped."""
    directory = tiny_llama_dir(tmp_path, tie_word_embeddings=True)
    tensors = load_file(directory / "model.safetensors")
    matrices = torch.randn((2, *tensors.pop(EMBEDDING).shape), generator=torch.Generator().manual_seed(3))
    tensors |= {name: matrices[index].clone() for name, index in present.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    if not present:
        with pytest.raises(ModelError, match="every weight must be in the checkpoint"):
            export_hf(directory)
        return
    exported = export_hf(directory)
    model = tiny_model("llama")
    indices = {name: present.get(name, 0) for name in (HEAD, EMBEDDING)}
    model.load_state_dict(tensors | {name: matrices[index] for name, index in indices.items()})
    with torch.no_grad():
        np.testing.assert_allclose(_logits(exported), model(torch.arange(3, 15)[None]).logits.numpy(), atol=1e-4)
    stored = [value for value in exported.model.graph.initializers.values() if value.shape == [320, 64]]
    assert len(stored) == n_stored


def test_missing_head_without_tying_is_refused(tmp_path):
    directory = tiny_llama_dir(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 are missing, first lm_head\.weight .*filled from the embedding only when"):
        export_hf(directory)


def test_missing_shard_is_refused(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    missing = sorted(tmp_path.glob("*.safetensors"))[1]
    missing.unlink()
    with pytest.raises(ModelError, match=f"must lie beside it, {missing.name} does not"):
        export_hf(tmp_path)


def test_truncated_weights_are_refused(tmp_path):
    directory = tiny_llama_dir(tmp_path)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"model\.safetensors: the file cannot be read as safetensors"):
        export_hf(directory)


def test_other_shape_than_configured_is_refused(tmp_path):
    directory = tiny_llama_dir(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"intermediate_size": 80}))
    with pytest.raises(ModelError, match=r"mlp\.down_proj\.weight has \(64, 96\) instead of \(64, 80\)"):
        export_hf(directory)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json must exist"),
        ("{", "configuration cannot be read"),
        ('{"model_type": "no_such_model"}', "configuration cannot be read"),
        ('{"model_type": "t5"}', "t5 is an encoder-decoder"),
        ('{"auto_map": {"AutoConfig": "code.Config"}, "model_type": "own"}', "configuration cannot be read"),
    ],
)
def test_configurations_that_cannot_be_used(tmp_path, content, message):
    directory = tiny_dir(tmp_path)
    (directory / "config.json").unlink()
    if content is not None:
        (directory / "config.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        export_hf(directory)


def test_state_dict_is_used_without_copies(expected):
    model = tiny_model("llama")
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    exported = export_state_dict(model.config, tensors, source="somewhere", name="mine")
    np.testing.assert_allclose(_logits(exported), expected, atol=1e-5)
    for name, tensor in tensors.items():
        assert exported.model.graph.initializers[name].const_value.raw.data_ptr() == tensor.data_ptr()
    assert (exported.source, exported.info.name) == ("somewhere", "mine")


def test_incomplete_state_dict_is_refused():
    model = tiny_model("llama")
    tensors = model.state_dict()
    del tensors["model.norm.weight"]
    with pytest.raises(ModelError, match=r"first model\.norm\.weight"):
        export_state_dict(model.config, tensors)
