"""Wrong requests to compile: refused before any work, by an error of one line, and nothing written."""

from __future__ import annotations

import json
import os

import pytest

FRESH = [
    (["--passes", "fold-constants{depth=1}"], "pass fold-constants: required option=value, got 'depth=1'"),
    (["--passes", "fold constants"], "passes: required name{option=value},name, got 'fold constants'"),
    (["--passes", "quantize-weights{bits=3}"], "option bits: required one of 4, 8, got '3'"),
    (["--passes", "quantize-weights{exclude=[}"], "a regular expression is required, got '['"),
    (["--exclude", "("], "a regular expression is required, got '('"),
    (["--dump-after", "nonsense"], "pass 'nonsense': there is no such pass"),
    (["--dump-after", "all", "--dump-dir", "/nonexistent"], "--dump-dir: a folder that can be written is required"),
    (["--dump-dir", "."], "passes: dump_dir needs dump_after"),
    (["--gate-prompts", "0"], "gate.n_prompts: Input should be greater than or equal to 1, got '0'"),
    (["--gate-prompts", "100000"], "gate.n_prompts: Input should be less than or equal to 1000"),
    (["--gate-tokens", "7"], "gate.n_tokens"),
    (["--head-precision", "fp16"], "weights.head_precision"),
    (["--precision", "fp32", "--exclude", "x"], "exclude needs a precision of int4, int8 or keep, got fp32"),
    (["--precision", "fp16", "--block-size", "64"], "block_size needs a precision of int4"),
    (["--block-size", "48"], "weights.block_size"),
    (["--draft-precision", "int8"], "a draft of kind `ngram` has no weights"),
    (["--draft", "none", "--draft-precision", "int8"], "a draft of kind `none` has no weights"),
    (["--name", ""], "name: String should have at least 1 character"),
    (["--slots", "0"], "n_slots"),
    (["--slots", "257"], "n_slots"),
    (["--window", "0"], "window"),
    (["--max-length", "7"], "max_length"),
    (["--threads", "0"], "threads"),
    (["--eos-id", "-1"], "eos_ids.0"),
    (["--kernels", "magic"], "kernels"),
    (["--backend", "tpu"], "backends.0"),
    (["--arch", "sm_1"], "sm_1"),
    (["--arch", "sm_90"], "archs: sm_90 needs the backend `cuda`"),
    (["--cuda-attention", "dspark"], "cuda_attention: `dspark` needs the backend `cuda`"),
]


@pytest.mark.parametrize(
    ("options", "message"), FRESH, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_compile_refuses_before_it_reads_anything(refused, tiny_source, tmp_path, monkeypatch, options, message):
    monkeypatch.setattr("dsc.compiler.compile.load_sources", None)
    monkeypatch.setattr("dsc.compiler.dry_run._describe", None)
    for more in ([], ["--dry-run"]):
        line = refused("compile", tiny_source, "-o", tmp_path / "out.dsmodel", *options, *more)
        assert message in line
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_refuses_what_the_compile_would(refused, tiny_source, tmp_path):
    (tmp_path / "there.dsmodel").write_text("mine")
    dry = ["compile", tiny_source, "--dry-run", "-o"]
    assert "the file exists" in refused(*dry, tmp_path / "there.dsmodel")
    assert "a folder that can be written" in refused(*dry, tmp_path / "no" / "folder.dsmodel")
    assert "a file is required" in refused(*dry, tmp_path)
    assert "has at most 512 positions, got 9999" in refused(*dry, tmp_path / "x", "--max-length", 9999)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a recipe is a mapping of options, got NoneType"),
        ("- window", "a recipe is a mapping of options, got list"),
        ("a: b: c", "not valid YAML"),
        ("window: 4\nwindow: 8", "the key 'window' stands twice"),
        ("draft: {kind: self, kind: none}", "the key 'kind' stands twice"),
        ("a: " + "[" * 5000, "not valid YAML"),
        ("draft: self", "draft: Input should be a valid dictionary"),
        ("weights: int4", "weights: Input should be a valid dictionary"),
        ("passes: fold-constants", "passes: Input should be a valid dictionary"),
        ("gate: 5", "gate: Input should be a valid dictionary"),
        ("window: true", "window: Input should be a valid integer, got 'True'"),
        ("window: '4'", "window: Input should be a valid integer"),
        ("window: 4.0", "window: Input should be a valid integer"),
        ("n_slots: yes", "n_slots: Input should be a valid integer"),
        ("force: 'yes'", "force: Input should be a valid boolean"),
        ("gate: {strict: 0}", "gate.strict: Input should be a valid boolean"),
        ("eos_ids: 2", "eos_ids: Input should be a valid tuple"),
        ("weights: {exclude: lm_head}", "weights.exclude: Input should be a valid tuple"),
        ("name: 5", "name: Input should be a valid string"),
        ("1: 2", "1: "),
        ("draft: {kind: model, source: [x]}", "draft.source: Input is not a valid path"),
        ("draft: {kind: model}", "a draft of kind `model` needs `source`"),
        ("draft: {kind: self, source: x}", "a draft of kind `self` takes no `source`"),
        ("draft: {kind: ngram, max_length: 64}", "a draft of kind `ngram` takes no `max_length`"),
        ("max_length: .nan", "max_length: Input should be a valid integer"),
        ("archs: [sm_90, 5]", "archs.1: "),
    ],
)
def test_a_wrong_recipe_is_refused_with_its_field(refused, tiny_source, tmp_path, text, message):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text)
    line = refused("compile", tiny_source, "-o", tmp_path / "x.dsmodel", "--recipe", recipe, "--dry-run")
    assert f"error: {recipe}: " in line
    assert message in line


def test_a_recipe_is_a_small_text_file(refused, tiny_source, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    command = ["compile", tiny_source, "-o", tmp_path / "x.dsmodel", "--recipe", recipe]
    recipe.write_bytes(b"name: \xff")
    assert "not valid YAML" in refused(*command)
    recipe.write_text("#" * (2 << 20))
    assert "at most 1048576 bytes" in refused(*command)
    recipe.unlink()
    recipe.mkdir()
    assert "Is a directory" in refused(*command)


def test_a_draft_on_the_command_line_replaces_the_recipes(dsc, tiny_source, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"draft: {{kind: model, source: {tiny_source}}}")
    command = ["compile", tiny_source, "-o", tmp_path / "x.dsmodel", "--recipe", recipe, "--dry-run", "--json"]
    assert json.loads(dsc(*command)[1])["draft kind"] == "model"
    assert json.loads(dsc(*command, "--draft", "ngram")[1])["draft kind"] == "ngram"


def file_of(content: bytes, name: str):
    return lambda folder: (folder / name).write_bytes(content)


SOURCES = {
    "nothing.gguf": (lambda folder: None, "nothing is"),
    "model.txt": (file_of(b"x", "model.txt"), "a directory with config.json, a .gguf or an .onnx file is required"),
    "empty.gguf": (file_of(b"", "empty.gguf"), "GGUF"),
    "text.gguf": (file_of(b"hello" * 99, "text.gguf"), "GGUF"),
    "pipe.gguf": (lambda folder: os.mkfifo(folder / "pipe.gguf"), "is required"),
    "empty.onnx": (file_of(b"", "empty.onnx"), "a key-value cache is required"),
    "text.onnx": (file_of(b"hello" * 99, "text.onnx"), "an ONNX model is required"),
    "folder": (lambda folder: (folder / "folder").mkdir(), "config.json must exist"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_no_model_is_named(refused, tmp_path, name):
    make, message = SOURCES[name]
    make(tmp_path)
    for more in ([], ["--dry-run"]):
        line = refused("compile", tmp_path / name, "-o", tmp_path / "x.dsmodel", *more)
        assert message in line
        assert str(tmp_path / name) in line
    assert not (tmp_path / "x.dsmodel").exists()
    refused("check-tokenizers", tmp_path / name, tmp_path / name)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff", b"{}", b'{"model_type": "nonsense"}', b'{"model_type": 5}']
)
def test_a_configuration_that_is_none_is_named(refused, tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    for more in ([], ["--dry-run"]):
        assert str(tmp_path) in refused("compile", tmp_path, "-o", tmp_path / "x.dsmodel", *more)
