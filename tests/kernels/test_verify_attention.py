"""VerifyAttention: reference and function body against each other and against a loop over single queries."""

from __future__ import annotations

import numpy as np
import pytest
from attention_by_loops import attend
from run_operator import run_operator

from dsc.kernels.contract import check_contract
from dsc.kernels.verify_attention import VERIFY_ATTENTION, make_inputs, reference
from dsc.kernels.verify_attention_body import function_body

SHAPES = [
    VERIFY_ATTENTION.example,
    {"B": 1, "Hq": 3, "Hkv": 1, "S": 1, "D": 8, "M": 1},
    {"B": 2, "Hq": 4, "Hkv": 4, "S": 9, "D": 5, "M": 64},
    {"B": 1, "Hq": 9, "Hkv": 3, "S": 17, "D": 64, "M": 130},
]
VARIANTS = [
    {},
    {"window": 4},
    {"softcap": 1.5},
    {"scale": 0.3, "window": 1},
    {"window": 1000, "softcap": 20.0},
]


def without(inputs, sinks, tree):
    dropped = {name for name, kept in (("sinks", sinks), ("tree_mask", tree)) if not kept}
    return {name: value for name, value in inputs.items() if name not in dropped}


def test_the_contract_holds():
    check_contract(VERIFY_ATTENTION)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("attributes", VARIANTS, ids=str)
@pytest.mark.parametrize("axes", SHAPES, ids=str)
def test_body_and_reference_agree(axes, attributes, sinks, tree):
    inputs = without(make_inputs(axes, seed=3), sinks, tree)
    attributes = {"scale": 0.2} | attributes
    wanted = reference(inputs, attributes)
    names = [role.name for role in VERIFY_ATTENTION.inputs]
    found = run_operator("VerifyAttention", inputs, names, list(wanted), attributes, function_body(sinks, tree))
    for name, value in wanted.items():
        VERIFY_ATTENTION.assert_agrees(name, found[name], value)


@pytest.mark.parametrize("attributes", VARIANTS, ids=str)
def test_reference_agrees_with_one_query_at_a_time(attributes):
    inputs = make_inputs(VERIFY_ATTENTION.example, seed=5)
    attributes = {"scale": 0.2} | attributes
    wanted = attend(
        *(inputs[name] for name in ("q", "k", "v", "k_pool", "v_pool", "past_lengths")),
        sinks=inputs["sinks"],
        tree_mask=inputs["tree_mask"],
        **attributes,
    )
    for (name, value), expected in zip(reference(inputs, attributes).items(), wanted, strict=True):
        VERIFY_ATTENTION.assert_agrees(name, value, expected)


def test_rows_past_the_valid_ones_never_matter():
    axes = dict(VERIFY_ATTENTION.example)
    inputs = without(make_inputs(axes, seed=7), sinks=False, tree=False)
    dirty = {name: value.copy() for name, value in inputs.items()}
    for b, past in enumerate(inputs["past_lengths"]):
        dirty["k_pool"][b, :, past:] = np.nan
        dirty["v_pool"][b, :, past:] = np.nan
    clean = {name: value.copy() for name, value in inputs.items()}
    for b, past in enumerate(inputs["past_lengths"]):
        clean["k_pool"][b, :, past:] = 0
        clean["v_pool"][b, :, past:] = 0
    np.testing.assert_array_equal(reference(dirty, {})["o"], reference(clean, {})["o"])
