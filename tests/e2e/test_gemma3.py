"""Gemma 3 270M from K-quants to text: sliding windows, a vocabulary of 262,144, a head that is the embedding."""

from __future__ import annotations

from collections import Counter
from importlib import import_module

import pytest
from bundle_size import size_over_tensors
from real_models import gemma3_gguf

from dsc.bundle_schema.kv_layout import resized, without_rings
from dsc.runtime import load

pytestmark = pytest.mark.slow

COUNT = "one two three four five six seven one two three four five six seven one two three"
PLAIN = "The capital of France is"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """The file's own blocks, prompt lookup as draft."""
    from dsc.compiler.compile import compile_bundle
    from dsc.compiler.request import build_request

    output = tmp_path_factory.mktemp("gemma3") / "gemma3.dsmodel"
    gate = {"n_prompts": 2, "n_tokens": 16, "n_draws": 0}
    options = {"target": gemma3_gguf(), "output": output, "gate": gate, "threads": 2, "max_length": 2048}
    report = compile_bundle(build_request(options))
    for stage in report.stages:
        print(f"{stage.name}: {stage.seconds:.1f} s")
    return output


@pytest.fixture(scope="module")
def model(bundle):
    return load(bundle, threads=2)


def test_it_is_the_model_that_the_file_holds(model):
    certificate = model.bundle.certificate
    assert certificate.verdict == "pass"
    assert certificate.parity.correlation > 0.97
    assert certificate.finite.n_not_finite == 0
    info = model.bundle.manifest.target.info
    assert info.quantization == "carried Q4_K, Q5_0, Q6_K, Q8_0"
    assert {layer.window for layer in info.kv_layers} == {512, None}
    answer = model.generate(PLAIN, 12, speculation="off")
    print(repr(answer.text))
    assert "France" in answer.text


def test_the_file_adds_less_than_a_fiftieth_to_its_tensors(bundle):
    share, members = size_over_tensors(bundle)
    print(f"{share:.2%} over the tensors")
    assert 0 < share < 0.02
    assert "tokenizer/merges.bin" in members


def test_speculation_changes_nothing_and_accepts_something(model):
    for prompt, window in ((COUNT, 3), (COUNT, 8), (PLAIN, 4)):
        plain = model.generate(prompt, 48, speculation="off", ignore_eos=True)
        settings = {"proposer": "ngram", "window": window, "fallback": False}
        found = model.generate(prompt, 48, speculation=settings, ignore_eos=True)
        print(repr(found.text), found.stats.accepted)
        assert found.ids == plain.ids
        assert found.stats.accepted > 0 or prompt == PLAIN


@pytest.fixture(scope="module")
def with_all_rows(bundle):
    """The same graphs over an arena without rings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            import_module("dsc.runtime.load"), "resized", lambda plan, *sizes: resized(without_rings(plan), *sizes)
        )
        return load(bundle, threads=2)


def test_windows_have_rings(model, with_all_rows):
    rows = [Counter(slot.rows for slot in one.bundle.arena.plan.slots) for one in (model, with_all_rows)]
    assert rows == [{640: 30, 2176: 6}, {2176: 36}]
    assert model.bundle.arena.nbytes < 0.45 * with_all_rows.bundle.arena.nbytes


@pytest.mark.parametrize("n_prompt", [400, 511, 635, 1700])
def test_a_text_longer_than_the_sliding_window(model, with_all_rows, n_prompt):
    """Before the window is full, before and after its ring is, and after many turns of it."""
    prompt = model.encode(f"{COUNT} four five six seven, {PLAIN} not eight. " * 80)[:n_prompt]
    plain = with_all_rows.generate(prompt, 40, speculation="off", ignore_eos=True)
    for settings in ("off", {"proposer": "ngram", "window": 6, "fallback": False}):
        found = model.generate(prompt, 40, speculation=settings, ignore_eos=True)
        assert found.ids == plain.ids
    print(found.stats.accepted, repr(found.text))
