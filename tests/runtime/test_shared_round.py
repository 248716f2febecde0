"""What a round of several sequences reads of prompts and which drafts it verifies."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsc.bundle_schema.dflash_config import BatchedPolicy
from dsc.runtime.acceptance import AcceptanceModel, RoundCosts
from dsc.runtime.schedule_admission import admitted_prefix
from dsc.runtime.schedule_policy import Offer
from dsc.runtime.shared_round import LEAST_PROMPT_ROWS, admitted_windows, fair_shares, prompt_rows
from dsc.runtime.speculator import Intent

FLAT = RoundCosts(tuple(1 + 0.01 * rows for rows in range(16)), step_ms=10.0)
STEEP = RoundCosts(tuple(1 + 0.5 * rows for rows in range(16)), step_ms=10.0)
LANES = BatchedPolicy()


def intent(window, first=0.9, later=0.9, joint=True, draft_step=0.0, costs=FLAT):
    table = [costs.round(k) + draft_step * k for k in range(window + 1)]
    offer = Offer(0, window, AcceptanceModel(first, later), table, draft_step == 0.0)
    return Intent(offer, window, "", None, joint)


@given(wanted=st.lists(st.integers(1, 300), max_size=8), budget=st.integers(0, 600))
def test_shares_are_fair_and_waste_nothing(wanted, budget):
    shares = fair_shares(wanted, budget)
    assert sum(shares) == min(budget, sum(wanted))
    for (mine, want), (others, _) in itertools.permutations(zip(shares, wanted, strict=True), 2):
        assert mine <= want
        assert mine == want or others <= mine + 1


@given(
    slope=st.floats(0.001, 1), decoding=st.integers(1, 8), stretch=st.floats(1, 4), most=st.sampled_from([1, 64, 512])
)
def test_prompts_take_the_time_that_they_may(slope, decoding, stretch, most):
    costs = RoundCosts(tuple(1 + slope * rows for rows in range(16)))
    rows = prompt_rows(costs, costs, decoding, stretch, most)
    limit = stretch * costs.round(decoding - 1)
    assert min(LEAST_PROMPT_ROWS, most) <= rows <= most
    assert rows <= LEAST_PROMPT_ROWS or costs.round(decoding + rows - 1) <= limit
    assert rows == most or costs.round(decoding + rows) > limit


def test_prompts_alone_are_read_as_fast_as_possible():
    assert prompt_rows(STEEP, STEEP, 0, 1.0, 512) == 512


def test_rows_behind_a_long_context_are_fewer():
    late = RoundCosts(FLAT.verify, step_ms=3 * FLAT.step_ms)
    assert LEAST_PROMPT_ROWS < prompt_rows(FLAT, late, 3, 2.0, 512) < prompt_rows(FLAT, FLAT, 3, 2.0, 512)


def test_drafts_are_weighed_together():
    alone = admitted_windows([intent(8, 0.7, 0.7, costs=STEEP)], STEEP, 1)
    sure, unsure = intent(8, 0.95, 0.95), intent(8, 0.3, 0.3)
    first, second = admitted_windows([sure, unsure], STEEP, 2)
    assert first > second == 0
    assert admitted_windows([sure, unsure], FLAT, 2)[1] > 0
    assert alone[0] >= admitted_windows([intent(8, 0.7, 0.7)] * 4, STEEP, 4)[0]


def test_what_is_not_asked_about_stays_and_counts():
    fixed = intent(5, joint=False)
    windows = admitted_windows([fixed, Intent(reason="no proposal"), intent(8)], FLAT, 3)
    assert windows[:2] == [5, 0]
    assert 0 < windows[2] <= 8


def test_drafts_that_cost_their_own_forward_must_earn_it():
    cheap, dear = ([intent(8, 0.6, 0.6, draft_step=step)] * 2 for step in (0.0, 0.8))
    assert sum(admitted_windows(dear, FLAT, 2)) < sum(admitted_windows(cheap, FLAT, 2))


@pytest.mark.parametrize(("rows", "positions"), [(4, 3), (17, 2), (40, 1)])
def test_the_steady_lane_follows_the_load(rows, positions):
    lanes = BatchedPolicy(max_rows=24 if rows < 24 else 44, fast_lane_ms=1e6)
    assert admitted_windows([intent(8, 0.99, 0.99)], FLAT, rows, lanes) == [positions]


def test_the_fast_lane_has_a_budget():
    unlikely = [intent(4, share, 0.1) for share in (0.02, 0.06, 0.04)]
    all_first = admitted_windows(unlikely, STEEP, 3, BatchedPolicy(fast_lane_ms=1e6))
    assert all_first == [1, 1, 1]
    assert admitted_windows(unlikely, STEEP, 3, BatchedPolicy(fast_lane_ms=11.0)) == [0, 1, 1]
    assert admitted_windows(unlikely, STEEP, 3, BatchedPolicy(fast_lane_ms=0.0)) == [0, 0, 0]


@given(
    shares=st.lists(st.tuples(st.floats(0.01, 0.99), st.floats(0.01, 0.99)), min_size=1, max_size=5),
    slope=st.floats(0.001, 1),
    lanes=st.sampled_from([None, LANES, BatchedPolicy(max_rows=6)]),
)
def test_windows_stay_within_what_was_intended(shares, slope, lanes):
    costs = RoundCosts(tuple(1 + slope * rows for rows in range(16)), step_ms=10.0)
    intents = [intent(6, *pair) for pair in shares]
    windows = admitted_windows(intents, costs, len(intents), lanes)
    assert all(0 <= window <= 6 for window in windows)
    if lanes is not None:
        assert sum(windows) <= max(lanes.max_rows - len(intents), 0)


@given(
    chains=st.lists(
        st.lists(st.floats(0, 1), max_size=4).map(lambda c: sorted(c, reverse=True)), min_size=1, max_size=4
    ),
    data=st.data(),
)
def test_certain_positions_are_never_taken_back(chains, data):
    certain = [data.draw(st.integers(0, min(1, len(chain)))) for chain in chains]
    costs = [1 + 0.2 * count for count in range(20)]
    admitted = admitted_prefix(chains, costs, certain)
    bounds = zip(admitted, certain, chains, strict=True)
    assert all(least <= found <= len(chain) for found, least, chain in bounds)
    assert admitted_prefix(chains, costs, [0] * len(chains)) == admitted_prefix(chains, costs)
