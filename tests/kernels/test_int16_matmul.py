"""Int16MatMul and Int16Gather: references, bodies in bare onnxruntime, native operators."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_operator import run_native, session_of
from run_operator import run_operator

from dsc.kernels import int16_gather, int16_matmul
from dsc.kernels.contract import check_contract
from dsc.kernels.dense_matmul import DENSE_MATMUL
from dsc.kernels.int16 import unpack
from dsc.kernels.int16_gather import INT16_GATHER
from dsc.kernels.int16_matmul import INT16_MATMUL

SHAPES = [(1, 32, 1), (2, 64, 7), (3, 96, 33), (9, 576, 64), (127, 96, 70), (128, 1536, 71), (5, 9000 // 32 * 32, 3)]


def made(rows, k, n, seed=1):
    axes = {"M": rows, "K": k, "G": k // 32, "E": k // 8, "N": n, "P": -(-n // 2)}
    return INT16_MATMUL.make_inputs(axes, seed), {"K": k, "N": n}


def body(inputs, attributes):
    names = ["x", "codes", "scales"]
    return run_operator("Int16MatMul", inputs, names, ["y"], attributes, int16_matmul.function_body())["y"]


def native(inputs, attributes, threads=2):
    return run_native(INT16_MATMUL, inputs, attributes, threads)["y"]


@pytest.mark.parametrize("contract", [INT16_MATMUL, INT16_GATHER], ids=lambda contract: contract.name)
def test_the_contracts_hold(contract):
    check_contract(contract)


@pytest.mark.parametrize("run", [body, native])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_agrees_with_the_reference(shape, run):
    inputs, attributes = made(*shape)
    INT16_MATMUL.assert_agrees("y", run(inputs, attributes), INT16_MATMUL.reference(inputs, attributes)["y"])


@given(
    rows=st.one_of(st.integers(0, 40), st.integers(126, 131)),
    blocks=st.integers(1, 9),
    columns=st.integers(1, 70),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60)
def test_every_result_is_the_same_bits_as_with_the_floats(rows, blocks, columns, seed):
    inputs, attributes = made(rows, 32 * blocks, columns, seed)
    weight = unpack(inputs["codes"], inputs["scales"], columns)
    wanted = run_native(DENSE_MATMUL, {"x": inputs["x"], "weight": weight}, {}, threads=2)["y"]
    np.testing.assert_array_equal(native(inputs, attributes), wanted)


def test_more_than_fits_on_a_stack_is_the_same_too():
    inputs, attributes = made(130, 8224, 9)
    weight = unpack(inputs["codes"], inputs["scales"], 9)
    wanted = run_native(DENSE_MATMUL, {"x": inputs["x"], "weight": weight}, {}, threads=2)["y"]
    np.testing.assert_array_equal(native(inputs, attributes), wanted)


@pytest.mark.parametrize("rows", [4, 128])
def test_a_bad_number_stays_in_its_row(rows):
    inputs, attributes = made(rows, 64, 9)
    clean = native(inputs, attributes)
    inputs["x"][1, 3] = np.nan
    found = native(inputs, attributes)
    assert np.isnan(found[1]).all()
    np.testing.assert_array_equal(np.delete(found, 1, 0), np.delete(clean, 1, 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((2, 32), np.float32)}, "x must end in K"),
        ({"codes": np.zeros((4, 8, 16), np.int16)}, "codes must be"),
        ({"codes": np.zeros((3, 8, 2, 8), np.int16)}, "codes must be"),
        ({"scales": np.zeros((4, 2), np.float32)}, "scales of 16-bit codes must be"),
        ({"scales": np.zeros((4, 3, 2), np.float32)}, "scales of 16-bit codes must be"),
    ],
)
def test_wrong_shapes_are_refused(change, message):
    inputs, attributes = made(2, 64, 7)
    wrong = inputs | change
    with pytest.raises(Exception, match=message):
        session_of(INT16_MATMUL, wrong, attributes).run(None, wrong)


@pytest.mark.parametrize(("sizes", "message"), [({"K": 63}, "multiple of 32"), ({"N": 0}, "N of 16-bit codes")])
def test_wrong_sizes_are_refused(sizes, message):
    inputs, attributes = made(2, 64, 7)
    with pytest.raises(Exception, match=message):
        session_of(INT16_MATMUL, inputs, attributes | sizes)


def table(n, k, ids, seed=2):
    codes, scales = int16_matmul.make_weight(n + n % 2, k, seed)
    return {"ids": np.array(ids), "codes": codes, "scales": scales}, {"K": k, "N": n}


@pytest.mark.parametrize("ids", [[0, 6, 3, 3, 2], [[1, 2, 3], [6, 0, 5]], [[[4]]]], ids=str)
@pytest.mark.parametrize("k", [32, 96])
def test_gathered_rows_are_those_of_the_product(k, ids):
    inputs, attributes = table(7, k, np.array(ids, np.int64))
    wanted = unpack(inputs["codes"], inputs["scales"], 7)[inputs["ids"]]
    names = ["ids", "codes", "scales"]
    bare = run_operator("Int16Gather", inputs, names, ["rows"], attributes, int16_gather.function_body())["rows"]
    np.testing.assert_array_equal(bare, wanted)
    np.testing.assert_array_equal(run_native(INT16_GATHER, inputs, attributes, threads=2)["rows"], wanted)


@pytest.mark.parametrize("bad", [-1, 7])
def test_ids_outside_the_table_are_refused(bad):
    inputs, attributes = table(7, 32, np.array([0, bad]))
    with pytest.raises(Exception, match="an id is not within"):
        session_of(INT16_GATHER, inputs, attributes).run(None, inputs)
