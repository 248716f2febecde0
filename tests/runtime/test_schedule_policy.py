"""What each policy chooses, and that its choice depends on nothing but what it is given."""

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsc.bundle_schema.dflash_config import DflashConfig, apply_override
from dsc.runtime.acceptance import AcceptanceModel, RoundCosts
from dsc.runtime.schedule_admission import admitted_prefix
from dsc.runtime.schedule_costs import LiveCosts, round_table
from dsc.runtime.schedule_policy import CalibratedPolicy, Offer, make_policy
from dsc.runtime.schedule_rules import History
from dsc.runtime.signals import Signals

FLAT = round_table(RoundCosts.from_ms([10 + 0.2 * rows for rows in range(16)]))
STEEP = round_table(RoundCosts.from_ms([10.0 + 5 * rows for rows in range(16)]))
DRAFTED = round_table(RoundCosts.from_ms([10 + 0.2 * row for row in range(16)], [4.0 * k for k in range(1, 17)]))


def model(first: float = 0.8, later: float = 0.8, limit: int = 8, costs=DRAFTED, lane: int = 0) -> Offer:
    return Offer(lane, limit, AcceptanceModel(first, later), costs, lookup=False)


def lookup(first: float = 0.5, later: float = 0.8, limit: int = 8, costs=FLAT, lane: int = 1) -> Offer:
    return Offer(lane, limit, AcceptanceModel(first, later), costs, lookup=True)


def policy(name: str, **changes):
    return make_policy(apply_override(DflashConfig(), {"policy": name, **changes}))


NOTHING, FRESH = Signals(), History()


def choose(policy, *offers, signals=NOTHING, history=FRESH) -> tuple[int | None, int]:
    choice = policy.choose(offers, signals, history)
    return (choice.offer.lane if choice.window else None), choice.window


def test_fixed_takes_the_first_offer_and_its_window():
    assert choose(policy("fixed"), model(0.01, 0.01), lookup()) == (0, 4)
    assert choose(policy("fixed"), model(limit=2)) == (0, 2)
    assert choose(make_policy(DflashConfig(), window=7), lookup(0.01)) == (1, 7)
    assert choose(policy("fixed"), lookup(0.01, costs=STEEP)) == (None, 0)


def brute_force(offers) -> float:
    """The best rate over every proposer and window."""
    rates = [1.0]
    for offer in offers:
        for window, tokens in enumerate(offer.acceptance.expected(offer.limit), 1):
            rates.append(tokens / offer.costs[window])
    return max(rates)


@given(st.lists(st.tuples(*[st.floats(0.01, 0.99)] * 2, st.integers(1, 16), st.sampled_from([FLAT, STEEP, DRAFTED])),
                min_size=1, max_size=4))  # fmt: skip
def test_calibrated_finds_the_highest_rate(rows):
    offers = [
        Offer(lane, limit, AcceptanceModel(first, later), costs, lookup=False)
        for lane, (first, later, limit, costs) in enumerate(rows)
    ]
    choice = CalibratedPolicy().choose(offers, Signals(), History())
    tokens = [1.0, *choice.offer.acceptance.expected(choice.window)][-1]
    assert tokens / choice.offer.costs[choice.window] == pytest.approx(brute_force(offers))


def test_calibrated_wants_a_gain_before_it_drafts():
    assert choose(policy("calibrated"), lookup(0.06, costs=FLAT))[1] > 0
    assert choose(policy("calibrated", **{"calibrated.min_gain": 0.2}), lookup(0.06, costs=FLAT)) == (None, 0)
    assert choose(policy("calibrated"), model(0.99, 0.99), lookup(0.95, 0.95))[0] == 1
    assert choose(policy("calibrated"), model(0.99, 0.99, costs=FLAT), lookup(0.3))[0] == 0


def test_rules_follow_the_path_selector():
    rules = policy("rules")
    sure, unsure, lost = (Signals(entropy_ratio=ratio, gap=0.9) for ratio in (0.5, 1.0, 2.0))
    assert choose(rules, model(), lookup(), signals=sure) == (1, 4)
    assert choose(rules, model(), lookup(), signals=unsure) == (0, 3)  # a burst
    assert choose(rules, model(), lookup(), signals=lost) == (None, 0)
    assert choose(rules, lookup(), signals=unsure) == (1, 4)  # there is no model to run
    assert choose(policy("rules", **{"selector.enabled": False}), model(), lookup(), signals=lost) == (0, 4)


def test_batched_admits_while_the_rate_rises():
    assert choose(policy("batched"), model(0.9, 0.9, costs=FLAT)) == (0, 8)
    assert choose(policy("batched"), model(0.1, 0.1, costs=STEEP)) == (None, 0)


@given(st.floats(0.01, 0.99), st.floats(0.01, 0.99), st.integers(1, 16),
       st.lists(st.floats(0, 1), min_size=16, max_size=16))  # fmt: skip
def test_batched_admits_of_one_sequence_what_admission_does(first, later, limit, rises):
    costs = [1.0, *accumulate(rises, initial=1.0 + rises[0])][: limit + 1]
    offer = model(first, later, limit, costs)
    (admitted,) = admitted_prefix([offer.acceptance.survivals(limit)], costs)
    assert choose(policy("batched"), offer)[1] == admitted


def test_admission_stops_at_the_first_fall():
    # Two drafts would pay again, but the second may not be looked at: speeds and survivals of DSpark's example.
    assert admitted_prefix([[0.8, 0.8]], [1 / 1.0, 1 / 0.5, 1 / 0.45]) == [0]
    assert admitted_prefix([[0.8, 0.8]], [1 / 1.0, 1 / 0.6, 1 / 0.35]) == [1]


@given(
    st.lists(st.lists(st.floats(0, 1), max_size=6), min_size=1, max_size=5),
    st.lists(st.floats(0.01, 1), min_size=1, max_size=20),
)
def test_admission_takes_prefixes_of_the_likeliest_positions(conditionals, costs):
    survivals = []
    for row in conditionals:
        chain, product = [], 1.0
        for share in row:
            product *= share
            chain.append(product)
        survivals.append(chain)
    admitted = admitted_prefix(survivals, costs)
    taken = [chain[i] for chain, n in zip(survivals, admitted, strict=True) for i in range(n)]
    left = [chain[n] for chain, n in zip(survivals, admitted, strict=True) if n < len(chain)]
    assert len(taken) < len(costs)
    assert not taken or not left or min(taken) >= max(left)
    rates = [(len(survivals) + sum(sorted(taken, reverse=True)[:n])) / costs[n] for n in range(len(taken) + 1)]
    assert rates == sorted(rates)


def test_live_costs_follow_what_was_measured_and_keep_the_shape_elsewhere():
    live = LiveCosts([10.0, 11, 12, 13], [5.0, 10, 15, 20], 0.0, weight=0.5)
    assert live.costs() == RoundCosts.from_ms([10.0, 11, 12, 13], [5.0, 10, 15, 20])
    live.observe(rows=1, forward_ms=20.0)
    assert live.verify_ms() == pytest.approx([20.0, 22, 24, 26])
    live.observe(rows=3, forward_ms=48.0, drafted=2, draft_ms=5.0)
    live.observe(rows=3, forward_ms=24.0)
    assert live.verify_ms() == pytest.approx([20.0, 22, 36, 39])
    assert live.draft_ms() == pytest.approx([2.5, 5, 7.5, 10])
    live.observe(rows=99, forward_ms=1.0)
    assert live.verify_ms()[0] == pytest.approx(20)


def test_what_seemed_dear_once_is_tried_again():
    live = LiveCosts([10.0, 11, 12, 13], [5.0, 10, 15, 20], 0.0, weight=0.5)
    live.follow(rows=2, forward_ms=110.0, drafted=1, draft_ms=50.0)
    assert live.verify_ms()[1] == 11  # the first run prepares memory and fetches weights
    live.follow(rows=2, forward_ms=110.0, drafted=1, draft_ms=50.0)
    assert (live.verify_ms()[1], live.draft_ms()[0]) == (22, 10)
    live.follow(rows=2, forward_ms=110.0)
    assert live.verify_ms()[1] == pytest.approx(33)  # what is said again is believed
    live.age()
    assert live.verify_ms()[1] == pytest.approx(33)
    dear = live.verify_ms()[1]
    for _ in range(20):
        live.age()
        assert 11 < live.verify_ms()[1] < dear
        dear = live.verify_ms()[1]
    assert dear == pytest.approx(11, rel=0.05)


@pytest.mark.parametrize("slow", [1, 5])
def test_a_slow_machine_is_believed_in_time(slow):
    live = LiveCosts([10.0, 11, 12, 13], (), 0.0, weight=0.1)
    for _ in range(30):
        live.follow(rows=2, forward_ms=11.0 * slow)
    assert live.verify_ms()[1] == pytest.approx(11 * slow, rel=0.1)
