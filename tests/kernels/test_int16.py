"""16-bit weights: which floats are exactly that, and the layout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsc.kernels.int16 import exact_scales, pack_codes, pack_scales, unpack


def round_trip(weight):
    scales = exact_scales(weight)
    assert scales is not None
    return unpack(pack_codes(weight, scales), pack_scales(scales), len(weight))


def by_blocks(rng, n, blocks, form):
    """The floats of checkpoints' blocks, as the gguf package makes them."""
    d = (rng.standard_normal((n, blocks, 1)) * 0.01).astype(np.float16).astype(np.float32)
    if form == "Q8_0":
        weight = d * rng.integers(-128, 128, (n, blocks, 32)).astype(np.float32)
    elif form == "Q4_0":
        weight = d * rng.integers(-8, 8, (n, blocks, 32)).astype(np.float32)
    else:
        m = (-8 * d * rng.uniform(0.7, 1.1, d.shape)).astype(np.float16).astype(np.float32)
        weight = d * rng.integers(0, 16, (n, blocks, 32)).astype(np.float32) + m
    return weight.reshape(n, -1).astype(np.float32)


@given(
    form=st.sampled_from(["Q8_0", "Q4_0", "Q4_1"]),
    n=st.integers(1, 20),
    blocks=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60)
def test_the_floats_of_quantised_checkpoints_come_back_exactly(form, n, blocks, seed):
    weight = by_blocks(np.random.default_rng(seed), n, blocks, form)
    np.testing.assert_array_equal(round_trip(weight), weight)


@given(
    exponent=st.integers(-126, 100),
    divisor=st.integers(1, 2**8),
    largest=st.integers(1, 2**15 - 1),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=60)
def test_any_number_times_16_bits_is_found(exponent, divisor, largest, seed):
    codes = np.random.default_rng(seed).integers(-largest, largest + 1, (3, 64))
    weight = (codes * (divisor * 2.0**exponent)).astype(np.float32)
    np.testing.assert_array_equal(round_trip(weight), weight)


def test_the_scale_is_a_power_of_two_where_that_will_do():
    weight = np.zeros((3, 32), np.float32)
    weight[0, :3] = 12, -18, 30
    weight[2, :2] = 3 * (2**15 - 1), -9
    np.testing.assert_array_equal(exact_scales(weight), [[2], [1], [3]])
    np.testing.assert_array_equal(round_trip(weight), weight)


def damaged(at, value):
    weight = by_blocks(np.random.default_rng(3), 70, 2, "Q4_1")
    weight[at] = value
    return weight


@pytest.mark.parametrize("row", [0, 69])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e-40, 1e30, 1 + 2**-23])
def test_one_weight_that_does_not_fit_is_enough(row, value):
    assert exact_scales(damaged((row, 5), np.float32(value))) is None


def test_trained_floats_and_odd_sizes_have_no_scales():
    rng = np.random.default_rng(0)
    assert exact_scales(rng.standard_normal((40, 96)).astype(np.float32)) is None
    assert exact_scales(np.ones((4, 40), np.float32)) is None
    assert exact_scales(np.ones((0, 32), np.float32)) is None
    smallest = np.full((1, 32), 2.0**-126, np.float32)
    smallest[0, 0] *= np.float32(1.5)  # the divisor would be below what floats hold exactly
    assert exact_scales(smallest) is None


def test_the_layout_is_eight_of_a_column_and_eight_of_the_next():
    weight = np.arange(3 * 32, dtype=np.float32).reshape(3, 32)
    codes = pack_codes(weight, np.ones((3, 1), np.float32))
    assert codes.shape == (2, 4, 2, 8)
    np.testing.assert_array_equal(codes[0, 1, 1], np.arange(32 + 8, 32 + 16))
    assert not codes[1, :, 1].any(), "zeros fill up the last pair"
    np.testing.assert_array_equal(pack_scales(np.array([[1, 2], [3, 4], [5, 6]]))[0], [[1, 3], [2, 4]])
