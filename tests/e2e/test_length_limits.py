"""Lengths at which something changes, each exact on both sides: a sliding window, other frequencies, the plan's end."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_dir, tiny_model

from dsc.bundle_schema.errors import GenerationError, PlanError
from dsc.compiler.compile import compile_bundle
from dsc.compiler.inspect import inspect_bundle
from dsc.compiler.request import build_request
from dsc.runtime import load

WINDOW = 8
SWITCH = 16
LONG_ROTARY = {
    "max_position_embeddings": 4 * SWITCH,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": SWITCH,
        "short_factor": [1 + i / 10 for i in range(8)],
        "long_factor": [2 + i / 2 for i in range(8)],
    },
}
SMALLEST_GATE = {"n_prompts": 1, "n_tokens": 8, "n_draws": 0}


def compiled(folder, family, max_length=None, **overrides):
    """A bundle of a tiny model with a draft made of itself."""
    source = tiny_dir(folder / "source", family, **overrides)
    options = {"target": source, "output": folder / "out.dsmodel", "gate": SMALLEST_GATE, "max_length": max_length}
    compile_bundle(build_request(options | {"draft": {"kind": "self", "precision": "int8"}}))
    return folder / "out.dsmodel"


def drafting(window):
    return [{"proposer": kind, "window": window, "fallback": False} for kind in ("self", "ngram")]


def frameworks_greedy(model, prompt, n_new):
    """The framework on the whole text for every token."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(n_new):
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("window"), "mistral", max_length=32)


@pytest.mark.parametrize("kernels", ["auto", "ort"])
@pytest.mark.parametrize("n_prompt", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 1])
def test_a_sliding_window_is_the_frameworks_wherever_the_text_crosses_it(windowed, kernels, n_prompt):
    model = load(windowed, kernels=kernels, threads=1)
    assert {layer.window for layer in model.bundle.manifest.target.info.kv_layers} == {WINDOW}
    prompt = [3 + 7 * i % 300 for i in range(n_prompt)]
    wanted = frameworks_greedy(tiny_model("mistral"), prompt, 12)
    assert wanted != frameworks_greedy(tiny_model("mistral", sliding_window=None), prompt, 12)
    for speculation in ("off", *drafting(1), *drafting(WINDOW)):
        assert list(model.generate(prompt, 12, speculation=speculation, ignore_eos=True).ids) == wanted


@pytest.fixture(scope="module")
def long_rotary(tmp_path_factory):
    return compiled(tmp_path_factory.mktemp("rotary"), "llama", **LONG_ROTARY)


@pytest.mark.parametrize("n_prompt", [1, SWITCH - 4, SWITCH - 1])
def test_frequencies_are_the_frameworks_up_to_the_length_where_they_change(long_rotary, n_prompt):
    """Beyond it the keys that are cached would have to be computed anew, so no text gets there."""
    model = load(long_rotary, threads=1)
    prompt = [3 + 7 * i % 300 for i in range(n_prompt)]
    wanted = frameworks_greedy(tiny_model("llama", **LONG_ROTARY), prompt, SWITCH - n_prompt)
    for speculation in ("off", *drafting(6)):
        result = model.generate(prompt, speculation=speculation, ignore_eos=True)
        assert list(result.ids) == wanted
        assert result.finish_reason == "length"


def test_a_length_beyond_the_change_is_refused_with_both_numbers(long_rotary, tmp_path):
    assert inspect_bundle(long_rotary)["kv_plan cpu"]["positions"] == SWITCH
    source = long_rotary.parent / "source"
    request = build_request({"target": source, "output": tmp_path / "out.dsmodel", "max_length": SWITCH + 1})
    with pytest.raises(PlanError, match=f"at most {SWITCH} positions, got {SWITCH + 1}"):
        compile_bundle(request)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(GenerationError, match=f"at most {SWITCH - 1} tokens .* in {SWITCH}, got {SWITCH + 1}"):
        load(long_rotary).generate([5] * (SWITCH + 1))
