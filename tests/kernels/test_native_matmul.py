"""The native InterleavedMatMul: right to a few units in the last place, and the same bits for any rows and threads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_operator import matmul_attributes, multiply, session_of

from dsc.kernels.block_matmul import make_bits_inputs, reference
from dsc.kernels.interleaved_matmul import INTERLEAVED_MATMUL, function_body, interleaved

SHAPES = [
    {"M": 1, "G": 1, "N": 1},
    {"M": 2, "G": 3, "N": 7},
    {"M": 3, "G": 7, "N": 33},
    {"M": 5, "G": 8, "N": 64},
    {"M": 17, "G": 18, "N": 70},
    {"M": 16, "G": 13, "N": 131},
    {"M": 4, "G": 48, "N": 36},
    {"M": 37, "G": 69, "N": 50},
]


def inputs_of(axes, seed, bits, mins=True):
    inputs = make_bits_inputs(axes, seed, bits)
    if not mins:
        del inputs["mins"]
    return inputs


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("mins", [False, True])
@pytest.mark.parametrize("axes", SHAPES, ids=str)
def test_it_agrees_with_the_reference_closely(axes, mins, bits):
    inputs = inputs_of(axes, 3, bits, mins)
    wanted = reference(inputs, {"bits": bits})["y"]
    found = multiply(inputs, bits, threads=2)
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= 2e-6 * np.abs(wanted).max()


@given(
    rows=st.integers(2, 40),
    groups=st.integers(1, 70),
    columns=st.integers(1, 70),
    bits=st.sampled_from([4, 8]),
    mins=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=40)
def test_a_row_is_the_same_bits_alone_and_among_others(rows, groups, columns, bits, mins, seed):
    inputs = inputs_of({"M": rows, "G": groups, "N": columns}, seed, bits, mins)
    together = multiply(inputs, bits, threads=2)
    tiles = interleaved(inputs)
    session = session_of(INTERLEAVED_MATMUL, tiles, matmul_attributes(inputs, bits))
    for row in range(rows):
        (alone,) = session.run(None, tiles | {"x": inputs["x"][row : row + 1]})
        np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.parametrize("bits", [4, 8])
def test_many_rows_are_the_same_bits_for_any_number_of_threads(bits):
    inputs = inputs_of({"M": 203, "G": 18, "N": 75}, 5, bits)
    np.testing.assert_array_equal(multiply(inputs, bits, threads=1), multiply(inputs, bits, threads=2))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [2, 6])
def test_extreme_codes_do_not_overflow(bits, rows):
    inputs = inputs_of({"M": rows, "G": 9, "N": 5}, 7, bits)
    inputs["x"] = np.where(np.arange(9 * 32) % 2, np.float32(-1), np.float32(1)) * np.ones((rows, 1), np.float32)
    inputs["x"][rows // 2 :] = 1
    for code in (0, 255):
        inputs["qweight"][:] = code
        wanted = reference(inputs, {"bits": bits})["y"]
        np.testing.assert_allclose(multiply(inputs, bits), wanted, rtol=2e-6, atol=1e-5)


def test_zero_rows_stay_zero_and_tiny_ones_stay_finite():
    inputs = inputs_of({"M": 3, "G": 5, "N": 9}, 9, 4)
    inputs["x"][0] = 0
    inputs["x"][1] = 1e-42
    found = multiply(inputs, 4)
    assert (found[0] == 0).all()
    assert np.abs(found[1]).max() < 1e-38


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_bad_activation_shows_in_its_own_row_only(bad):
    inputs = inputs_of({"M": 4, "G": 5, "N": 9}, 11, 4)
    clean = multiply(inputs, 4)
    inputs["x"][2, 77] = bad
    found = multiply(inputs, 4)
    assert not np.isfinite(found[2]).any()
    np.testing.assert_array_equal(np.delete(found, 2, 0), np.delete(clean, 2, 0))


def test_leading_axes_are_kept():
    inputs = inputs_of({"M": 6, "G": 3, "N": 11}, 13, 8)
    flat = multiply(inputs, 8)
    inputs["x"] = inputs["x"].reshape(2, 3, 96)
    np.testing.assert_array_equal(multiply(inputs, 8), flat.reshape(2, 3, 11))


def test_no_rows_give_no_rows():
    inputs = inputs_of({"M": 1, "G": 3, "N": 11}, 15, 4)
    assert multiply(inputs | {"x": inputs["x"][:0]}, 4).shape == (0, 11)


@pytest.mark.parametrize("overload", ["", "mins"])
def test_it_runs_in_place_of_a_function_body(overload):
    inputs = inputs_of({"M": 3, "G": 5, "N": 37}, 17, 4)
    wanted = multiply(inputs, 4)
    function = function_body(has_mins=True)
    function.overload = overload
    attributes, tiles = matmul_attributes(inputs, 4), interleaved(inputs)
    session = session_of(INTERLEAVED_MATMUL, tiles, attributes, function=function, overload=overload)
    np.testing.assert_array_equal(session.run(None, tiles)[0], wanted)


@pytest.mark.parametrize(
    ("name", "cut", "message"),
    [
        ("x", np.s_[:, :64], "x must end in K"),
        ("qweight", np.s_[:0], "qweight must be"),
        ("qweight", np.s_[:, :, :, :8], "qweight must be"),
        ("scales", np.s_[:, :-1], "scales must be"),
        ("mins", np.s_[:0], "mins must be"),
    ],
)
def test_wrong_shapes_are_refused(name, cut, message):
    inputs = inputs_of({"M": 3, "G": 5, "N": 9}, 19, 4)
    tiles = interleaved(inputs)
    session = session_of(INTERLEAVED_MATMUL, tiles, matmul_attributes(inputs, 4))
    with pytest.raises(Exception, match=message):
        session.run(None, tiles | {name: np.ascontiguousarray(tiles[name][cut])})


@pytest.mark.parametrize("wrong", [{"bits": 5}, {"K": 100}, {"N": 0}])
def test_wrong_attributes_are_refused(wrong):
    inputs = inputs_of({"M": 3, "G": 5, "N": 9}, 21, 4)
    with pytest.raises(Exception, match="interleaved matrix"):
        session_of(INTERLEAVED_MATMUL, interleaved(inputs), matmul_attributes(inputs, 4) | wrong)
