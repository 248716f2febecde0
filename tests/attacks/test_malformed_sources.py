"""Files beside a checkpoint that are no sound JSON or YAML: refused in dsc's own words, or of no effect."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from onnx_exports import buffer_decoder, save_export
from tiny_models import tiny_llama_dir, tiny_model, write_tokenizer

from dsc.bundle_schema.container import rewrite_members
from dsc.bundle_schema.errors import DscError, ModelError
from dsc.compiler.export_hf import export_hf
from dsc.compiler.onnx_adopt import adopt_onnx
from dsc.compiler.request import load_recipe
from dsc.compiler.tokenizer_compact import compact_tokenizer
from dsc.compiler.trace_reader import read_trace
from dsc.runtime import load

HOSTILE = {
    "deep lists": b"[" * 20_000,
    "deep objects": b'{"a":' * 20_000,
    "deep and closed": b'{"a":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "long number": b'{"vocab_size": ' + b"9" * 10_000 + b"}",
    "not a number": b'{"vocab_size": NaN, "hidden_size": Infinity}',
    "not utf-8": b'{"a": "\xff\xfe"}',
    "lone surrogate": b'{"model_type": "\\ud800"}',
    "a name that is a list": b'{"chat_template": [{"name": [], "template": "x"}]}',
    "a list": b"[]",
    "a number": b"1",
    "empty": b"",
    "zeros": bytes(4096),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A Hugging Face directory of two shards, and an ONNX export with everything that may lie beside it."""
    folder = tmp_path_factory.mktemp("sources")
    tiny_llama_dir(folder / "hf")
    (folder / "hf" / "model.safetensors").unlink()
    tiny_model("llama").save_pretrained(folder / "hf", max_shard_size="200KB")
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "max_position_embeddings": 128}
    save_export(folder / "onnx", buffer_decoder(vocab=320), **config, eos_token_id=1)
    for name in ("genai_config.json", "generation_config.json"):
        (folder / "onnx" / name).write_text("{}")
    write_tokenizer(folder / "onnx")
    return folder


def with_file(sources: Path, kind: str, name: str, content: bytes, tmp_path: Path) -> Path:
    folder = shutil.copytree(sources / kind, tmp_path / kind)
    assert (folder / name).exists()
    (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_checkpoint_is_refused(sources, tmp_path, name, content):
    with pytest.raises(ModelError) as refusal:
        export_hf(with_file(sources, "hf", name, content, tmp_path))
    assert len(str(refusal.value)) < 1000


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("name", ["config.json", "genai_config.json", "generation_config.json"])
def test_an_onnx_model_is_refused_or_does_without(sources, tmp_path, name, content):
    with suppress(ModelError):
        adopt_onnx(with_file(sources, "onnx", name, content, tmp_path) / "model.onnx")


@pytest.mark.parametrize("name", ["../model-00001-of-00002.safetensors", "/etc/passwd", "a/b.safetensors", "", 5, None])
def test_a_shard_elsewhere_is_refused(sources, tmp_path, name):
    folder = with_file(sources, "hf", "model.safetensors.index.json", b"", tmp_path)
    shutil.copy(next(folder.glob("*-00001-*")), tmp_path)
    weight_map = {"lm_head.weight": name}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        export_hf(folder)


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_bundles_tokenizer_is_refused_or_of_no_effect(tiny_bundle, tmp_path, name, content):
    path = tmp_path / "bad.dsmodel"
    rewrite_members(tiny_bundle, {f"tokenizer/{name}": content}, path)
    with suppress(DscError):
        load(path, verify="never").generate([5, 6], 2)


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_recipes_traces_and_tokenizers_are_refused_or_left_alone(tmp_path, content):
    file = tmp_path / "file"
    file.write_bytes(content)
    for read in (load_recipe, read_trace):
        with suppress(DscError):
            read(file)
    assert b"".join(compact_tokenizer(content).split()) == b"".join(content.split())  # white space at most goes
