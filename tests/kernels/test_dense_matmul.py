"""DenseMatMul: the reference, its body in bare onnxruntime, and the native operator."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_operator import library, run_native, session_of
from pass_graphs import run, text_model
from run_operator import run_operator

from dsc.kernels.contract import check_contract
from dsc.kernels.dense_matmul import DENSE_MATMUL, function_body, make_inputs, reference
from dsc.passes.attach_bodies import AttachBodiesPass

SHAPES = [
    {"M": 1, "K": 1, "N": 1},
    {"M": 2, "K": 8, "N": 7},
    {"M": 3, "K": 57, "N": 33},
    {"M": 7, "K": 576, "N": 64},
    {"M": 130, "K": 1536, "N": 70},
    {"M": 5, "K": 40000, "N": 3},
]


def body(inputs):
    return run_operator("DenseMatMul", inputs, ["x", "weight"], ["y"], {}, function_body())["y"]


def native(inputs, threads=2):
    return run_native(DENSE_MATMUL, inputs, {}, threads)["y"]


def test_the_contract_holds():
    check_contract(DENSE_MATMUL)


@pytest.mark.parametrize("run", [body, native])
@pytest.mark.parametrize("axes", SHAPES, ids=str)
def test_it_agrees_with_the_reference(axes, run):
    inputs = make_inputs(axes, 1)
    DENSE_MATMUL.assert_agrees("y", run(inputs), reference(inputs, {})["y"])


def test_leading_axes_stay():
    inputs = make_inputs({"M": 6, "K": 20, "N": 5}, 2)
    wanted = native(inputs)
    found = native(inputs | {"x": inputs["x"].reshape(2, 3, 20)})
    np.testing.assert_array_equal(found, wanted.reshape(2, 3, 5))
    assert native(inputs | {"x": np.zeros((0, 20), np.float32)}).shape == (0, 5)


@given(
    rows=st.integers(2, 40),
    k=st.integers(1, 200),
    columns=st.integers(1, 70),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=30)
def test_a_row_is_the_same_bits_alone_and_among_others(rows, k, columns, seed):
    inputs = make_inputs({"M": rows, "K": k, "N": columns}, seed)
    together = native(inputs)
    session = session_of(DENSE_MATMUL, inputs, {})
    for row in range(rows):
        (alone,) = session.run(None, inputs | {"x": inputs["x"][row : row + 1]})
        np.testing.assert_array_equal(alone[0], together[row])


def test_a_bad_number_stays_in_its_row():
    inputs = make_inputs({"M": 4, "K": 50, "N": 9}, 5)
    clean = native(inputs)
    inputs["x"][1, 3] = np.nan
    found = native(inputs)
    assert np.isnan(found[1]).all()
    np.testing.assert_array_equal(found[[0, 2, 3]], clean[[0, 2, 3]])


def test_wrong_shapes_are_refused():
    inputs = make_inputs({"M": 2, "K": 9, "N": 4}, 6)
    with pytest.raises(Exception, match="x must end in K"):
        native(inputs | {"x": np.zeros((2, 8), np.float32)})
    with pytest.raises(Exception, match="weight must be"):
        session_of(DENSE_MATMUL, inputs | {"weight": np.zeros((1, 4, 9), np.float32)}, {}).run(
            None, inputs | {"weight": np.zeros((1, 4, 9), np.float32)}
        )


def in_bfloat16(weight, ending=""):
    """A model of one product whose weight is held in bfloat16."""
    n, k = weight.shape
    terms, outputs = ("", f"float[m, {n}] y")
    if ending:
        terms, outputs = (f", float[m, {n}] skip, float[{n}] gain", f"float[m, {n}] y, float[m, {n}] sum")
    model = text_model(
        f"""agraph (float[m, {k}] x, bfloat16[{n}, {k}] w{terms}) => ({outputs})
        {{ {ending or "y = ai.dspark.DenseMatMul(x, w)"} }}""",
        w=weight.astype(ml_dtypes.bfloat16),
    )
    AttachBodiesPass()(model)
    return model


@given(
    rows=st.one_of(st.integers(0, 40), st.integers(126, 131)),
    k=st.integers(1, 200),
    columns=st.integers(1, 70),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=40)
def test_a_weight_in_bfloat16_gives_the_same_bits_as_the_floats_it_stands_for(rows, k, columns, seed):
    inputs = make_inputs({"M": rows, "K": k, "N": columns}, seed)
    inputs["weight"] = inputs["weight"].astype(ml_dtypes.bfloat16).astype(np.float32)
    model = in_bfloat16(inputs["weight"])
    found = run(model, {"x": inputs["x"]}, library=library())["y"]
    np.testing.assert_array_equal(found, native(inputs))
    bare = run(model, {"x": inputs["x"]})["y"]
    np.testing.assert_allclose(bare, found, rtol=1e-4, atol=1e-4 * np.abs(inputs["x"]).max(initial=1))


def test_a_weight_in_bfloat16_may_be_normalised_after():
    inputs = make_inputs({"M": 5, "K": 70, "N": 33}, 7)
    weight = inputs["weight"].astype(ml_dtypes.bfloat16).astype(np.float32)
    rng = np.random.default_rng(7)
    fed = {"x": inputs["x"], "skip": rng.standard_normal((5, 33)), "gain": rng.uniform(0.5, 2, 33)}
    fed = {name: value.astype(np.float32) for name, value in fed.items()}
    ending = "y, sum = ai.dspark.DenseMatMulSkipNorm <epsilon = 1e-5> (x, w, skip, gain)"
    model = in_bfloat16(weight, ending)
    found, bare = run(model, fed, library=library()), run(model, fed)
    np.testing.assert_array_equal(found["sum"], native({"x": fed["x"], "weight": weight}) + fed["skip"])
    for name in found:
        np.testing.assert_allclose(found[name], bare[name], rtol=1e-4, atol=1e-3)
