"""The layout by sixteen columns: every byte where the definition puts it, and back again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsc.kernels.interleave import (
    COLUMNS,
    interleave_codes,
    interleave_factors,
    separate_codes,
    separate_factors,
    tiles_of,
)

sizes = {"n": st.integers(1, 70), "groups": st.integers(1, 9), "seed": st.integers(0, 2**32 - 1)}


@given(**sizes, size=st.sampled_from([16, 32]))
def test_every_code_lies_where_it_should(n, groups, size, seed):
    codes = np.random.default_rng(seed).integers(0, 256, (n, groups, size), dtype=np.uint8)
    found = interleave_codes(codes)
    assert found.shape == (tiles_of(n), groups, size // 4, COLUMNS, 4)
    assert found.flags.c_contiguous
    for column in (0, n // 2, n - 1):
        for byte in range(size):
            kept = found[column // COLUMNS, :, byte // 4, column % COLUMNS, byte % 4]
            np.testing.assert_array_equal(kept, codes[column, :, byte])
    np.testing.assert_array_equal(separate_codes(found, n), codes)


@given(**sizes)
def test_factors_follow_their_columns(n, groups, seed):
    factors = np.random.default_rng(seed).standard_normal((n, groups)).astype(np.float32)
    found = interleave_factors(factors)
    assert found.shape == (tiles_of(n), groups, COLUMNS)
    np.testing.assert_array_equal(found[(n - 1) // COLUMNS, :, (n - 1) % COLUMNS], factors[n - 1])
    np.testing.assert_array_equal(separate_factors(found, n), factors)


@pytest.mark.parametrize("n", [1, 15, 17, 31])
def test_what_fills_up_the_last_columns_is_zero(n):
    codes, factors = np.full((n, 2, 16), 255, np.uint8), np.ones((n, 2), np.float32)
    assert interleave_codes(codes).sum(dtype=np.int64) == codes.sum(dtype=np.int64)
    assert interleave_factors(factors).sum() == factors.sum()
