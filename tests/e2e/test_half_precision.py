"""A model in float16: pools of half the bytes, the same text with speculation, no native kernels."""

from __future__ import annotations

import numpy as np
import pytest
from near_ties import assert_same_but_for_near_ties

from dsc.bundle_schema.container import open_bundle
from dsc.bundle_schema.errors import HostError
from dsc.bundle_schema.kv_plan import KV_PLAN_NAME, parse_plan
from dsc.bundle_schema.tensors import DType
from dsc.runtime import load
from dsc.runtime.kv_arena import KvArena

PROMPT = list(range(5, 40)) + list(range(5, 20))


@pytest.fixture(scope="module")
def half_bundle(tiny_source, tmp_path_factory):
    from dsc.compiler.compile import compile_bundle
    from dsc.compiler.request import build_request

    output = tmp_path_factory.mktemp("half") / "half.dsmodel"
    gate = {"n_prompts": 2, "n_tokens": 16, "n_draws": 0}
    compile_bundle(
        build_request({"target": tiny_source, "output": output, "gate": gate, "weights": {"precision": "fp16"}})
    )
    return output


def test_the_plan_and_the_arena_hold_half_the_bytes(half_bundle, tiny_bundle):
    plans = []
    for path in (half_bundle, tiny_bundle):
        with open_bundle(path) as bundle:
            plans.append(parse_plan(bundle.read(KV_PLAN_NAME)))
    half, full = (next(zone.nbytes for zone in plan.zones if zone.name == "target") for plan in plans)
    assert 2 * half == full
    assert {slot.dtype for slot in plans[0].slots} == {DType.FLOAT16}
    assert {pool.dtype for pool in KvArena(plans[0]).pools("target").values()} == {np.dtype(np.float16)}


@pytest.mark.parametrize("window", [1, 3, 8])
def test_speculation_changes_nothing(half_bundle, window):
    model = load(half_bundle, threads=1)
    assert (model.bundle.certificate.verdict, model.bundle.certificate.kernels) == ("pass", "ort")
    plain = model.generate(PROMPT, 40, speculation="off", ignore_eos=True)
    settings = {"proposer": "ngram", "window": window, "fallback": False}
    found = model.generate(PROMPT, 40, speculation=settings, ignore_eos=True)
    assert found.stats.evaluated > 0
    assert found.ids == plain.ids


def test_logits_are_those_of_float32_rounded(half_bundle, tiny_bundle):
    rows = []
    for path in (half_bundle, tiny_bundle):
        target = load(path, threads=1).bundle.target
        rows.append(target.forward(PROMPT, 17).copy())
    assert rows[0].dtype == np.float32
    assert 0 < np.abs(rows[0] - rows[1]).max() < 0.02 * np.ptp(rows[1])


def test_element_types_that_numpy_lacks_are_refused_by_name(half_bundle):
    with open_bundle(half_bundle) as bundle:
        plan = parse_plan(bundle.read(KV_PLAN_NAME))
    slots = tuple(slot.model_copy(update={"dtype": DType.BFLOAT16}) for slot in plan.slots)
    with pytest.raises(HostError, match=r"target layer 0 k: bfloat16 pools are not known on the CPU"):
        KvArena(plan.model_copy(update={"slots": slots})).zone("target", 8)


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.1, "top_p": 0.9, "seed": 4}]
)
def test_the_output_is_that_of_float32_but_for_near_ties(half_bundle, tiny_bundle, sampling):
    half, full = (load(path, threads=1) for path in (half_bundle, tiny_bundle))
    outputs = [model.generate(PROMPT, 40, sampling, speculation="off", ignore_eos=True).ids for model in (half, full)]
    assert_same_but_for_near_ties(full, PROMPT, outputs, sampling)
    wrong = [[*outputs[1][:7], (outputs[1][7] + 150) % 320, *outputs[1][8:]], outputs[1]]
    with pytest.raises(AssertionError, match=r"token 7: .* from a tie"):
        assert_same_but_for_near_ties(full, PROMPT, wrong, sampling)
