"""DenseMatMulSkipNorm and its kin: references, bodies in bare onnxruntime, native operators."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_operator import run_native, session_of
from run_operator import run_operator

from dsc.kernels.contract import check_contract
from dsc.kernels.dense_matmul import DENSE_MATMUL
from dsc.kernels.int16_matmul import INT16_MATMUL
from dsc.kernels.interleaved_matmul import INTERLEAVED_MATMUL
from dsc.kernels.matmul_skip_norm import (
    DENSE_MATMUL_SKIP_NORM,
    INT16_MATMUL_SKIP_NORM,
    INTERLEAVED_MATMUL_SKIP_NORM,
    dense_body,
    int16_body,
    interleaved_body,
)

EPSILON = {"epsilon": 1e-5}
PAIRS = {
    "dense": (DENSE_MATMUL_SKIP_NORM, DENSE_MATMUL),
    "int16": (INT16_MATMUL_SKIP_NORM, INT16_MATMUL),
    "int4": (INTERLEAVED_MATMUL_SKIP_NORM, INTERLEAVED_MATMUL),
    "int8": (INTERLEAVED_MATMUL_SKIP_NORM, INTERLEAVED_MATMUL),
}


def made(kind, rows, k, n, seed, mins=True):
    """Inputs and attributes; `k` counts blocks of 32 and `n` sixteens of columns."""
    if kind == "dense":
        return DENSE_MATMUL_SKIP_NORM.make_inputs({"M": rows, "K": 31 * k + 1, "N": 16 * n - 3}, seed), dict(EPSILON)
    if kind == "int16":
        axes = {"M": rows, "K": 32 * k, "G": k, "E": 4 * k, "N": 16 * n, "P": 8 * n}
        return INT16_MATMUL_SKIP_NORM.make_inputs(axes, seed), {"K": 32 * k, "N": 16 * n, **EPSILON}
    bits = 4 if kind == "int4" else 8
    axes = {"M": rows, "G": k, "K": 32 * k, "N": 16 * n, "T": n, "Q": bits}
    inputs = INTERLEAVED_MATMUL_SKIP_NORM.make_inputs(axes, seed)
    if not mins:
        del inputs["mins"]
    return inputs, {"bits": bits, "K": 32 * k, "N": 16 * n, "block": 32, **EPSILON}


KINDS = sorted(PAIRS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_contracts_hold(kind):
    check_contract(PAIRS[kind][0])


@pytest.mark.parametrize("mins", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 5), (17, 18, 36), (130, 3, 9)], ids=str)
def test_it_is_the_product_then_the_sum_then_its_norm(shape, kind, mins):
    inputs, attributes = made(kind, *shape, 3, mins)
    contract, product = PAIRS[kind]
    found = run_native(contract, inputs, attributes, threads=2)
    terms = {role.name: inputs[role.name] for role in product.inputs if role.name in inputs}
    alone = {name: value for name, value in attributes.items() if name in product.attributes}
    y = run_native(product, terms, alone, threads=2)["y"]
    np.testing.assert_array_equal(found["sum"], y + inputs["skip"])
    wide = found["sum"].astype(np.float64)
    wanted = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * inputs["gain"]
    np.testing.assert_allclose(found["normed"], wanted, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("mins", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_bodies_and_references_agree(kind, mins):
    inputs, attributes = made(kind, 5, 3, 4, 1, mins)
    contract = PAIRS[kind][0]
    bodies = {"dense": dense_body, "int16": int16_body}
    body = bodies[kind]() if kind in bodies else interleaved_body(mins)
    names, outputs = [role.name for role in contract.inputs], ["normed", "sum"]
    found, wanted = (
        run_operator(contract.name, inputs, names, outputs, attributes, body),
        contract.reference(inputs, attributes),
    )
    for name in outputs:
        contract.assert_agrees(name, found[name], wanted[name])


@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(2, 40),
    k=st.integers(1, 20),
    columns=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=40)
def test_a_row_is_the_same_bits_alone_and_among_others(kind, rows, k, columns, seed):
    inputs, attributes = made(kind, rows, k, columns, seed)
    contract = PAIRS[kind][0]
    together = run_native(contract, inputs, attributes, threads=2)
    session = session_of(contract, inputs, attributes)
    for row in range(rows):
        normed, total = session.run(None, inputs | {name: inputs[name][row : row + 1] for name in ("x", "skip")})
        np.testing.assert_array_equal(normed[0], together["normed"][row])
        np.testing.assert_array_equal(total[0], together["sum"][row])


def test_leading_axes_stay_and_no_rows_are_none():
    inputs, attributes = made("dense", 6, 2, 1, 2)
    wanted = run_native(DENSE_MATMUL_SKIP_NORM, inputs, attributes)["normed"]
    split = {name: inputs[name].reshape(2, 3, -1) for name in ("x", "skip")}
    found = run_native(DENSE_MATMUL_SKIP_NORM, inputs | split, attributes)["normed"]
    np.testing.assert_array_equal(found, wanted.reshape(2, 3, -1))
    none = {name: inputs[name][:0] for name in ("x", "skip")}
    assert run_native(DENSE_MATMUL_SKIP_NORM, inputs | none, attributes)["sum"].shape == (0, 13)


def test_a_bad_number_stays_in_its_row():
    inputs, attributes = made("int4", 4, 3, 2, 5)
    clean = run_native(INTERLEAVED_MATMUL_SKIP_NORM, inputs, attributes)
    inputs["skip"][1, 3] = np.nan
    found = run_native(INTERLEAVED_MATMUL_SKIP_NORM, inputs, attributes)
    assert np.isnan(found["normed"][1]).all()
    np.testing.assert_array_equal(found["normed"][[0, 2, 3]], clean["normed"][[0, 2, 3]])


def test_a_matrix_without_columns_is_refused():
    inputs, attributes = made("dense", 2, 1, 1, 6)
    none = inputs | {"weight": inputs["weight"][:0], "skip": inputs["skip"][:, :0], "gain": inputs["gain"][:0]}
    with pytest.raises(Exception, match="N of a normalised product must be positive"):
        session_of(DENSE_MATMUL_SKIP_NORM, none, attributes).run(None, none)


@pytest.mark.parametrize("kind", ["dense", "int8"])
@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [("skip", (1, 13), "skip must have the shape"), ("gain", (5,), r"gain must be \[N\]")],
)
def test_wrong_shapes_are_refused(kind, name, shape, message):
    inputs, attributes = made(kind, 2, 1, 1, 6)
    wrong = inputs | {name: np.ones(shape, np.float32)}
    with pytest.raises(Exception, match=message):
        session_of(PAIRS[kind][0], wrong, attributes).run(None, wrong)
