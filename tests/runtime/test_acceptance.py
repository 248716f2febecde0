from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsc.runtime.acceptance import AcceptanceModel, RoundCosts
from dsc.runtime.schedule_costs import round_table
from dsc.runtime.schedule_policy import Offer
from dsc.runtime.schedule_policy import best_window as best_offer

FP32 = RoundCosts.from_ms([40.0, 42.5, 43.0, 44.0, 44.5, 46.5, 50.0, 54.5, 57.0])
INT4 = RoundCosts.from_ms([13.4, 18.5, 20.5, 26.0, 26.0, 29.5, 33.0, 35.0, 40.0])


def best_window(acceptance: AcceptanceModel, costs: RoundCosts, limit: int) -> int:
    return best_offer(Offer(0, limit, acceptance, round_table(costs), lookup=True))[0]


def expected_tokens(acceptance: AcceptanceModel, window: int) -> float:
    return [1.0, *acceptance.expected(window)][-1]


def test_expected_tokens_is_the_sum_of_survivals():
    model = AcceptanceModel(first=0.5, later=0.8)
    assert expected_tokens(model, 0) == 1
    assert expected_tokens(model, 3) == pytest.approx(1 + 0.5 + 0.5 * 0.8 + 0.5 * 0.8 * 0.8)
    assert model.survivals(3) == pytest.approx([0.5, 0.5 * 0.8, 0.5 * 0.8 * 0.8])


def test_blocks_that_fail_at_once_teach_the_first_position_only():
    model = AcceptanceModel(first=0.5, later=0.8)
    for _ in range(100):
        model.observe(4, 0)
    assert expected_tokens(model, 1) < 1.05
    good = AcceptanceModel(first=0.5, later=0.8)
    for _ in range(100):
        good.observe(4, 4)
    assert expected_tokens(good, 4) > 4.8


def test_a_fading_memory_returns_to_the_prior():
    model = AcceptanceModel(first=0.5, later=0.8)
    for _ in range(20):
        model.observe(4, 0)
    for _ in range(400):
        model.fade()
    assert expected_tokens(model, 1) == pytest.approx(1.5, abs=1e-3)


def test_windows_follow_cost_and_acceptance():
    sure, unsure = AcceptanceModel(0.95, 0.95), AcceptanceModel(0.2, 0.5)
    assert best_window(sure, FP32, 8) >= 6
    assert best_window(unsure, INT4, 8) == 0
    assert best_window(unsure, FP32, 8) > 0
    assert best_window(sure, INT4, 8) < best_window(sure, FP32, 8) or best_window(sure, INT4, 8) == 8
    assert best_window(sure, FP32, 3) <= 3


def test_a_dear_draft_is_not_used():
    dear = RoundCosts.from_ms([10.0, 10.0, 10.0], [12.0, 24.0])
    assert best_window(AcceptanceModel(0.9, 0.9), dear, 2) == 0


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=16), st.lists(st.floats(0.1, 9), max_size=16))
def test_costs_start_at_one_and_never_fall(verify_ms, draft_ms):
    costs = RoundCosts.from_ms(verify_ms, draft_ms)
    rounds = [costs.round(window) for window in range(20)]
    assert rounds[0] == pytest.approx(1)
    assert all(later >= earlier - 1e-9 for earlier, later in pairwise(rounds))
    assert costs.catch_up(0) == 0


@pytest.mark.parametrize("draft_ms", [(), (3.0, 7.0)])
@pytest.mark.parametrize(("fewest", "most"), [(0, 16), (2, 2), (1, 3), (9, 12), (4, 40)])
def test_costs_of_many_rounds_are_those_of_each(fewest, most, draft_ms):
    costs = RoundCosts.from_ms([10.0, 12.0, 15.0], draft_ms)
    assert costs.rounds(fewest, most) == [costs.round(window) for window in range(fewest, most + 1)]
    assert costs.round(40) == pytest.approx(1.5 + 38 * 0.3 + (38 * 0.4 + 0.7 if draft_ms else 0))


def test_one_noisy_measurement_does_not_hide_what_more_rows_cost():
    costs = RoundCosts.from_ms([10.0, 30.0, 12.0, 13.0, 20.0])
    assert costs.verify == pytest.approx((1.0, 55 / 30, 55 / 30 + 0.01, 55 / 30 + 0.02, 2.0))
    assert RoundCosts.from_ms([12.0, 8.0, 20.0]).step_ms == pytest.approx(10)


def test_no_row_is_free():
    assert RoundCosts.from_ms([10.0, 10.0, 10.0, 15.0]).verify == pytest.approx((1.0, 1.01, 1.02, 1.5))
