"""Pearson's chi-square test of counts against a distribution, and the p-value's own series."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

SMALLEST_EXPECTED = 5.0


def chi_square(counts: NDArray[np.float64], p: NDArray[np.float64]) -> tuple[float, int, float]:
    """Statistic, degrees of freedom and p-value.

    Cells that expect fewer than five counts are pooled, and with one cell more where they expect too few together. A
    count where the distribution has none at all makes the p-value 0.

    Args:
        counts: [V], how often each outcome was seen.
        p: [V], the expected distribution.
    """
    n = counts.sum()
    if counts[p == 0].any():
        return math.inf, 1, 0.0
    expected = p * n
    large = expected >= SMALLEST_EXPECTED
    cells = sorted(((float(c), float(e)) for c, e in zip(counts[large], expected[large], strict=True)), key=_expects)
    seen, wanted = float(counts[~large].sum()), float(expected[~large].sum())
    if cells and wanted < SMALLEST_EXPECTED:  # together still too few: one count would look like a miracle
        seen, wanted = seen + cells[0][0], wanted + cells[0][1]
        cells[0] = seen, wanted
    elif wanted > 0:
        cells.append((seen, wanted))
    if len(cells) < 2:
        return 0.0, 0, 1.0
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    freedom = len(cells) - 1
    return statistic, freedom, upper_gamma(freedom / 2, statistic / 2)


def _expects(cell: tuple[float, float]) -> float:
    return cell[1]


def upper_gamma(a: float, x: float) -> float:
    """The regularised upper incomplete gamma function Q(a, x) (Abramowitz and Stegun 6.5.29, 6.5.31)."""
    if x <= 0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        n = a
        while term > total * 1e-15:
            n += 1
            term *= x / n
            total += term
        return max(0.0, 1 - total * scale)
    # Lentz's method for the continued fraction.
    b = x + 1 - a
    c, d = 1e300, 1 / b
    h = d
    for i in range(1, 10_000):
        an = -i * (i - a)
        b += 2
        d = 1 / (an * d + b)
        c = b + an / c
        h *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return scale * h
