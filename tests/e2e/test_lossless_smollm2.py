"""A real model, greedy, by every proposer with windows 1 to 8, in float32 and int8: the tokens of plain decoding."""

from __future__ import annotations

import pytest
from real_models import smollm2_gguf

from dsc.runtime import load

PROMPTS = (
    "Repeat exactly: the quick brown fox jumps over the lazy dog. the quick brown fox",
    "Write the numbers from one to ten, one on each line.",
    "Why do leaves change their colour in autumn?",
)
N_TOKENS = 32
# A draft model beside the int8 target: the same checkpoint in four bits, rounded, which is wrong now and then.
DRAFTS = {"fp32": {"kind": "self", "precision": "keep"}, "int8": {"kind": "model", "precision": "int4"}}


@pytest.fixture(scope="module", params=DRAFTS)
def model(request, tmp_path_factory):
    from dsc.compiler.compile import compile_bundle
    from dsc.compiler.request import build_request

    source, output = smollm2_gguf(), tmp_path_factory.mktemp("lossless") / f"{request.param}.dsmodel"
    draft = DRAFTS[request.param]
    if draft["kind"] == "model":
        draft = draft | {"source": source}
    gate = {"n_prompts": 2, "n_tokens": 16, "n_draws": 0}
    options = {"target": source, "output": output, "weights": {"precision": request.param}, "draft": draft}
    compile_bundle(build_request(options | {"gate": gate, "threads": 2}))
    return load(output, threads=2)


def test_speculative_output_is_plain_output(model):
    prompts = [model.encode([{"role": "user", "content": text}]) for text in PROMPTS]
    plain = [model.generate(ids, N_TOKENS, ignore_eos=True, speculation="off").ids for ids in prompts]
    lookup_and_draft = {"ngram", model.bundle.manifest.draft.kind}
    assert lookup_and_draft == set(model.proposers)
    for proposer in lookup_and_draft:
        proposed = accepted = 0
        for window in range(1, 9):
            speculation = {"proposer": proposer, "window": window, "fallback": False}
            for ids, expected in zip(prompts, plain, strict=True):
                result = model.generate(ids, N_TOKENS, ignore_eos=True, speculation=speculation)
                assert result.ids == expected
                proposed += result.stats.proposed
                accepted += result.stats.accepted
        assert 0 < accepted < proposed
