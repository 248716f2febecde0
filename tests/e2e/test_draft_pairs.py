"""Whole compiles of pairs that differ: in vocabulary width, in context length, in one token of the tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from onnx_exports import buffer_decoder, concat_decoder, save_export
from tiny_models import TINY_VOCAB, random_model, save_dir, tiny_config, write_tokenizer
from tokenizers import AddedToken, Tokenizer

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
    with torch.random.fork_rng():
        torch.manual_seed(1)  # the rows added are random
        model.resize_token_embeddings(WIDE, mean_resizing=False)
    model.lm_head.weight.data[TINY_VOCAB:] = 0
    model.lm_head.weight.data[TINY_VOCAB : TINY_VOCAB + 40] = model.lm_head.weight.data[280:TINY_VOCAB] * 1.02
    model.config.max_position_embeddings = 64
    save_dir(folder / "wide", model)
    return {TINY_VOCAB: export_hf(folder / "narrow"), WIDE: export_hf(folder / "wide")}


@pytest.fixture
def compile_pair(tmp_path, monkeypatch):
    """Compile models that were exported once."""

    def compile_exported(target, draft):
        sources = GraphSource(target), GraphSource(draft)
        monkeypatch.setattr(compiler, "load_sources", lambda request: sources)
        output = tmp_path / "pair.dsmodel"
        draft_options = {"kind": "model", "source": tmp_path}
        request = {"target": tmp_path, "output": output, "draft": draft_options, "gate": SMALL_GATE}
        assert compiler.compile_bundle(build_request(request)).certificate.verdict == "pass"
        return load(output)

    return compile_exported


@pytest.mark.parametrize(("target", "draft"), [(TINY_VOCAB, WIDE), (WIDE, TINY_VOCAB)])
def test_a_draft_of_another_width_drafts_and_the_output_is_the_target_s(exported, compile_pair, target, draft):
    model = compile_pair(exported[target], exported[draft])
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


def test_drafting_stops_at_the_end_of_the_draft_s_shorter_context(exported, compile_pair):
    model = compile_pair(exported[TINY_VOCAB], exported[WIDE])
    plain = model.generate("the cat", 100, ignore_eos=True, speculation="off")
    drafted = model.generate("the cat", 100, ignore_eos=True, speculation=EVERY_ROUND)
    assert drafted.ids == plain.ids
    assert drafted.stats.accepted > 10
    assert drafted.stats.fallbacks["draft context full"] > 30


@pytest.mark.parametrize("side", ["target", "draft"])
def test_an_added_token_that_one_side_lacks_pairs_and_is_stated_and_never_drafted(exported, compile_pair, side):
    """A chat template's token in a row of the padding: the rest of the two vocabularies is one."""
    plain = exported[WIDE]
    tokenizer = Tokenizer.from_buffer(plain.tokenizer["tokenizer.json"])
    tokenizer.add_special_tokens([AddedToken("<|tool|>", special=True)])
    added = tokenizer.token_to_id("<|tool|>")
    assert added == TINY_VOCAB
    files = plain.tokenizer | {"tokenizer.json": tokenizer.to_str().encode()}
    models = {"target": plain, "draft": plain, side: replace(plain, tokenizer=files)}
    model = compile_pair(models["target"], models["draft"])
    manifest = model.bundle.manifest
    assert (manifest.tokenizer.verdict, manifest.draft.n_shared) == ("mapped", TINY_VOCAB)
    assert "<|tool|>" in manifest.tokenizer.summary

    def say_it(logits, history, drafts):
        """The fifth token is the added one."""
        assert max(drafts, default=0) < added
        for row in range(len(logits)):
            if len(history) + row == n_prompt + 4:
                logits[row, added] = 1e4

    for prompt in ("the cat", "the <|tool|> cat", "with his that"):
        n_prompt = len(model.encode(prompt))
        options = {"max_new_tokens": 30, "ignore_eos": True, "processors": [say_it]}
        wanted = model.generate(prompt, speculation="off", **options)
        drafted = model.generate(prompt, speculation=EVERY_ROUND, **options)
        assert wanted.ids[4] == added
        assert drafted.ids == wanted.ids
        assert drafted.stats.accepted > 0


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
