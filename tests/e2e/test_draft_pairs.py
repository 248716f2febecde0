"""Whole compiles of pairs that differ: in vocabulary width, in context length, in one token of the tokenizer."""

from __future__ import annotations

import json

import pytest
from onnx_exports import buffer_decoder, concat_decoder, save_export
from tiny_models import TINY_VOCAB, random_model, save_dir, tiny_config, write_tokenizer

from dsc.bundle_schema.errors import PairError
from dsc.compiler import compile as compiler
from dsc.compiler.export_hf import export_hf
from dsc.compiler.request import build_request
from dsc.compiler.sources import GraphSource
from dsc.runtime import load

WIDE = 384
SMALL_GATE = {"n_prompts": 2, "n_tokens": 8, "n_draws": 0}
EVERY_ROUND = {"proposer": "model", "window": 3, "fallback": False}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """One model at two widths, by width: the wide one has more rows in embedding and head, and a shorter context."""
    folder = tmp_path_factory.mktemp("widths")
    model = random_model(tiny_config("llama", num_hidden_layers=1))
    save_dir(folder / "narrow", model)
    model.resize_token_embeddings(WIDE, mean_resizing=False)
    model.lm_head.weight.data[TINY_VOCAB:] = 0
    model.lm_head.weight.data[TINY_VOCAB : TINY_VOCAB + 40] = model.lm_head.weight.data[280:TINY_VOCAB] * 1.02
    model.config.max_position_embeddings = 64
    save_dir(folder / "wide", model)
    return {TINY_VOCAB: export_hf(folder / "narrow"), WIDE: export_hf(folder / "wide")}


@pytest.fixture
def compile_pair(exported, tmp_path, monkeypatch):
    """Compile models that were exported once: target and draft by their widths."""

    def compile_widths(target, draft):
        sources = GraphSource(exported[target]), GraphSource(exported[draft])
        monkeypatch.setattr(compiler, "load_sources", lambda request: sources)
        output = tmp_path / "pair.dsmodel"
        draft_options = {"kind": "model", "source": tmp_path}
        request = {"target": tmp_path, "output": output, "draft": draft_options, "gate": SMALL_GATE}
        assert compiler.compile_bundle(build_request(request)).certificate.verdict == "pass"
        return load(output)

    return compile_widths


@pytest.mark.parametrize(("target", "draft"), [(TINY_VOCAB, WIDE), (WIDE, TINY_VOCAB)])
def test_a_draft_of_another_width_drafts_and_the_output_is_the_target_s(compile_pair, target, draft):
    model = compile_pair(target, draft)
    manifest = model.bundle.manifest
    assert manifest.draft.n_shared == TINY_VOCAB
    assert manifest.tokenizer.verdict == "padded"
    pauses = accepted = 0
    for prompt in ("the cat", "with his that", "and the of"):
        plain = model.generate(prompt, 30, ignore_eos=True, speculation="off")
        drafted = model.generate(prompt, 30, ignore_eos=True, speculation=EVERY_ROUND)
        assert drafted.ids == plain.ids
        accepted += drafted.stats.accepted
        assert max(drafted.ids) < target
        pauses += drafted.stats.fallbacks["token unknown to the draft"]
    assert accepted > 0
    assert (pauses > 0) == (target > draft)


def test_drafting_stops_at_the_end_of_the_draft_s_shorter_context(compile_pair):
    model = compile_pair(TINY_VOCAB, WIDE)
    plain = model.generate("the cat", 100, ignore_eos=True, speculation="off")
    drafted = model.generate("the cat", 100, ignore_eos=True, speculation=EVERY_ROUND)
    assert drafted.ids == plain.ids
    assert drafted.stats.accepted > 10
    assert drafted.stats.fallbacks["draft context full"] > 30


def onnx_pair(folder):
    """A target and a draft that were exported elsewhere, each with the tokenizer."""
    heads = {"num_attention_heads": 4, "hidden_size": 64, "max_position_embeddings": 128, "eos_token_id": 1}
    target = save_export(folder / "target", concat_decoder(vocab=TINY_VOCAB), **heads)
    draft = save_export(folder / "draft", buffer_decoder(vocab=WIDE), **heads, num_key_value_heads=2)
    for path in (target, draft):
        write_tokenizer(path.parent)
    return target, draft


def test_two_adopted_graphs_make_a_pair(tmp_path):
    target, draft = onnx_pair(tmp_path)
    options = {"target": target, "output": tmp_path / "pair.dsmodel", "gate": SMALL_GATE}
    compiler.compile_bundle(build_request(options | {"draft": {"kind": "model", "source": draft}}))
    model = load(tmp_path / "pair.dsmodel")
    plain = model.generate("the cat", 30, ignore_eos=True, speculation="off")
    drafted = model.generate("the cat", 30, ignore_eos=True, speculation=EVERY_ROUND)
    assert drafted.ids == plain.ids
    assert drafted.stats.proposed > 0


def test_tokenizers_that_differ_at_one_merged_token_are_refused_and_nothing_is_written(tmp_path):
    target, draft = onnx_pair(tmp_path)
    file = draft.parent / "tokenizer.json"
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    old = "".join(merges.pop())
    merges.append(["z", "q"])
    changed = vocabulary.pop(old)
    vocabulary["zq"] = changed
    file.write_text(json.dumps(tokenizer), encoding="utf-8")
    output = tmp_path / "pair.dsmodel"
    options = {"target": target, "output": output, "draft": {"kind": "model", "source": draft}}
    with pytest.raises(PairError) as refusal:
        compiler.compile_bundle(build_request(options))
    message = str(refusal.value)
    assert str(changed) in message
    assert "zq" in message
    assert old in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "target"]
