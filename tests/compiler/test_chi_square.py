"""Pearson's test against values from tables, and cells that expect too little."""

import math

import numpy as np
import pytest

from dsc.compiler.chi_square import chi_square


def test_a_fair_die_by_hand():
    statistic, freedom, p = chi_square(np.array([5.0, 8, 9, 8, 10, 20]), np.full(6, 1 / 6))
    assert (statistic, freedom) == (pytest.approx(13.4), 5)
    assert p == pytest.approx(0.0199, abs=1e-4)  # the table's 0.05 and 0.01 are at 11.07 and 15.09


@pytest.mark.parametrize("seen", [0, 1])
def test_one_rare_count_is_no_miracle(seen):
    """An outcome expected 0.02 times in 200 draws comes now and then; alone in its cell it would be p = 1e-12."""
    counts = np.array([100.0, 100.0 - seen, seen])
    assert chi_square(counts, np.array([0.49995, 0.49995, 0.0001]))[1:] == (1, pytest.approx(1, abs=0.2))


def test_an_impossible_outcome_and_a_certain_one():
    assert chi_square(np.array([9.0, 1.0]), np.array([1.0, 0.0])) == (math.inf, 1, 0.0)
    assert chi_square(np.array([10.0, 0.0]), np.array([1.0, 0.0])) == (0.0, 0, 1.0)


def test_a_wrong_distribution_is_found():
    assert chi_square(np.array([600.0, 400.0]), np.array([0.5, 0.5]))[2] < 1e-9
