"""BlockMatMul: the reference against plain products of the de-quantised weight, the body against the reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_operator import run_operator

from dsc.kernels.block_matmul import BLOCK_MATMUL, dequantise, function_body, make_bits_inputs, reference
from dsc.kernels.contract import check_contract

SHAPES = [{"M": 1, "G": 1, "N": 9}, {"M": 3, "G": 5, "N": 37}, {"M": 8, "G": 18, "N": 96}]


def test_the_contract_holds():
    check_contract(BLOCK_MATMUL)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("mins", [False, True])
@pytest.mark.parametrize("axes", SHAPES, ids=str)
def test_reference_is_the_product_up_to_the_rounding_of_activations(axes, mins, bits):
    inputs = make_bits_inputs(axes, 1, bits)
    if not mins:
        del inputs["mins"]
    weight = dequantise(inputs["qweight"], inputs["scales"], inputs.get("mins"), bits)
    exact = inputs["x"].astype(np.float64) @ weight.T.astype(np.float64)
    codes_error = np.abs(inputs["x"]).max(axis=1, keepdims=True) / 254 * np.abs(weight).sum(axis=1)
    assert (np.abs(reference(inputs, {"bits": bits})["y"] - exact) <= codes_error + 1e-4).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("mins", [False, True])
@pytest.mark.parametrize("axes", SHAPES, ids=str)
def test_body_and_reference_agree(axes, mins, bits):
    inputs = make_bits_inputs(axes, 2, bits)
    if not mins:
        del inputs["mins"]
    attributes = {"bits": bits, "K": axes["G"] * 32, "N": axes["N"], "block": 32}
    names = [role.name for role in BLOCK_MATMUL.inputs]
    found = run_operator("BlockMatMul", inputs, names, ["y"], attributes, function_body(mins))
    BLOCK_MATMUL.assert_agrees("y", found["y"], reference(inputs, attributes)["y"])


@given(st.integers(1, 9), st.integers(0, 2**32 - 1), st.sampled_from([4, 8]))
@settings(max_examples=30)
def test_a_row_never_depends_on_the_others(rows, seed, bits):
    inputs = make_bits_inputs({"M": rows, "G": 3, "N": 7}, seed, bits)
    together = reference(inputs, {"bits": bits})["y"]
    for row in range(rows):
        alone = reference(inputs | {"x": inputs["x"][row : row + 1]}, {"bits": bits})["y"]
        np.testing.assert_array_equal(alone[0], together[row])
