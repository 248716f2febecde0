"""What the references of operators that only GPU kernels implement promise."""

from __future__ import annotations

import numpy as np

from dsc.kernels.markov_walk import MARKOV_WALK
from dsc.kernels.verify_attention import VERIFY_ATTENTION
from dsc.kernels.verify_attention_int8 import VERIFY_ATTENTION_INT8


def test_int8_attention_is_near_attention_over_the_same_values():
    axes = VERIFY_ATTENTION_INT8.example
    inputs = VERIFY_ATTENTION_INT8.make_inputs(axes, 1)
    plain = {name: array for name, array in inputs.items() if not name.endswith("scales")}
    for side in ("k", "v"):
        plain[f"{side}_pool"] = inputs[f"{side}_pool"] * inputs[f"{side}_scales"][:, None, None]
    wanted = VERIFY_ATTENTION.reference(plain, {})["o"]
    found = VERIFY_ATTENTION_INT8.reference(inputs, {})["o"]
    assert 0 < np.abs(found - wanted).max() < 0.05


def test_a_row_is_the_same_when_it_is_new_and_when_it_is_old():
    axes = {**VERIFY_ATTENTION_INT8.example, "S": 4}
    inputs = VERIFY_ATTENTION_INT8.make_inputs(axes, 2)
    inputs = {name: array for name, array in inputs.items() if name not in ("sinks", "tree_mask")}
    whole = VERIFY_ATTENTION_INT8.reference(inputs, {})
    first = {**inputs, **{name: inputs[name][:, :, :3] for name in ("q", "k", "v")}}
    after = VERIFY_ATTENTION_INT8.reference(first, {})
    last = {**inputs, **{name: inputs[name][:, :, 3:] for name in ("q", "k", "v")}}
    last |= {"k_pool": after["k_pool_out"], "v_pool": after["v_pool_out"], "past_lengths": inputs["past_lengths"] + 3}
    np.testing.assert_allclose(
        VERIFY_ATTENTION_INT8.reference(last, {})["o"], whole["o"][:, :, 3:], rtol=1e-5, atol=1e-6
    )


def test_the_walk_samples_its_own_q():
    """Chi-square of the first step over many uniform draws against the q that the walk reports."""
    inputs = MARKOV_WALK.make_inputs({"B": 1, "n": 1, "k": 4}, 0)
    n, counts, q = 4000, np.zeros(4), None
    uniforms = (np.arange(n) + 0.5) / n
    for uniform in uniforms:
        outputs = MARKOV_WALK.reference({**inputs, "uniforms": np.array([[uniform]], np.float32)}, {"temperature": 0.8})
        counts[inputs["ids"][0, 0].tolist().index(outputs["path"][0, 0])] += 1
        q = outputs["q"][0, 0]
    assert q is not None
    np.testing.assert_allclose(counts / n, q, atol=1.5 / n)
