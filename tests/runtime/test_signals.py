import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsc.bundle_schema.dflash_config import DflashConfig
from dsc.runtime.signals import SignalMeter, entropy_of, gap_of, top_log_probs


def reference(row: np.ndarray) -> tuple[list[float], float, float]:
    """Top-3 log-probabilities, entropy and gap by a plain softmax over the sorted row."""
    top = np.sort(row.astype(np.float64))[::-1][:3]
    p = np.exp(top - top.max())
    p /= p.sum()
    entropy = -sum(x * np.log(x) for x in p if x > 0)
    return list(np.log(np.maximum(p, np.exp(-50)))), entropy, (p[0] - p[1]) / p[0]


@given(st.lists(st.floats(-20, 20, width=32), min_size=3, max_size=40))
def test_top_three_agree_with_a_sorted_softmax(values):
    row = np.array(values, np.float32)
    before = row.copy()
    found = top_log_probs(row)
    log_probs, entropy, gap = reference(before)
    assert np.array_equal(row, before)
    assert found == pytest.approx(log_probs, abs=1e-5)
    assert entropy_of(found) == pytest.approx(entropy, abs=1e-5)
    assert gap_of(found) == pytest.approx(gap, abs=1e-5)


def test_padding_carries_no_weight():
    row = np.array([1.0, -np.inf, 2.0, -np.inf, -np.inf], np.float32)
    p = np.exp([2.0, 1.0]) / np.exp([2.0, 1.0]).sum()
    assert entropy_of(top_log_probs(row)) == pytest.approx(float(-(p * np.log(p)).sum()), abs=1e-9)
    alone = np.array([-np.inf, 5.0, -np.inf], np.float32)
    assert entropy_of(top_log_probs(alone)) == pytest.approx(0, abs=1e-9)
    assert gap_of(top_log_probs(alone)) == pytest.approx(1)
    assert len(top_log_probs(np.zeros(2, np.float32))) == 2


def meter(n_prompt: int = 10) -> SignalMeter:
    return SignalMeter(DflashConfig(), n_prompt)


def test_nothing_is_known_before_the_first_row():
    signals = meter().read(10)
    assert (signals.slope, signals.entropy, signals.entropy_ratio, signals.gap) == (None,) * 4
    assert (signals.plnp, signals.kv_hit_rate) == (0.0, 1.0)


def test_the_entropy_ratio_is_over_the_last_32_rows():
    gauge = meter()
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(50, 7)).astype(np.float32)
    for row in rows:
        gauge.see_target(row)
    entropies = [reference(row)[1] for row in rows]
    signals = gauge.read(25)
    assert signals.entropy_ratio == pytest.approx(entropies[-1] / np.mean(entropies[-32:]), rel=1e-4)
    assert signals.plnp == 1.5


def test_the_slope_is_the_change_between_draft_positions():
    gauge = meter()
    rows = np.random.default_rng(2).normal(size=(3, 9)).astype(np.float32)
    for row in rows:
        gauge.see_draft(row)
    gauge.settle(3, 1)
    top = np.array([reference(row)[0] for row in rows])
    assert gauge.read(10).slope == pytest.approx(np.abs(np.diff(top, axis=0)).mean(), rel=1e-4)
    gauge.settle(0, 0)  # a plain round changes nothing
    assert gauge.read(10).slope == pytest.approx(np.abs(np.diff(top, axis=0)).mean(), rel=1e-4)


def test_the_hit_rate_covers_the_last_128_rows_written():
    gauge = meter()
    gauge.settle(7, 0)
    assert gauge.read(10).kv_hit_rate == 1 / 8
    for _ in range(200):
        gauge.settle(3, 3)
    assert gauge.read(10).kv_hit_rate == 1.0
