import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsc.bundle_schema.dflash_config import Fallback
from dsc.runtime.fallback import SHORT_ANSWER, SpeculationAccount, model_start

INT4 = [1.0, 1.4, 1.7, 2.05, 2.1, 2.35, 2.8, 3.0, 3.4]

ALLOWANCE = 0.0075  # that a token earns with the standard configuration


def run(account: SpeculationAccount, accept, n_tokens: int) -> tuple[float, int]:
    """Cost of decoding `n_tokens`, and how many rounds drafted."""
    tokens, cost, drafted = 0, 0.0, 0
    while tokens < n_tokens:
        window = account.admit(INT4)
        accepted = min(accept(tokens), window)
        account.settle(window, accepted, INT4[window])
        tokens += accepted + 1
        cost += INT4[window]
        drafted += window > 0
    return cost, drafted


def test_unpredictable_text_costs_at_most_three_percent():
    for overhead in (0.01, 0.03, 0.1):
        for n_tokens in (SHORT_ANSWER, 70, 128, 500, 3000):
            cost, drafted = run(SpeculationAccount(Fallback(max_overhead=overhead)), lambda _: 0, n_tokens)
            assert drafted > 0 or overhead * SHORT_ANSWER < 1
            assert cost <= (1 + overhead) * n_tokens


@given(st.integers(0, 2**32))
def test_the_loss_is_bounded_on_any_text(seed):
    accept = random.Random(seed)
    cost, _ = run(SpeculationAccount(Fallback()), lambda _: accept.choice([0, 0, 0, 0, 1, 2, 8]), 400)
    assert cost <= 400 * 1.03 + 8


def test_a_draft_model_may_fail_twice_at_first_within_bounds():
    assert model_start(1.1) == 1.5
    assert model_start(2.2) == 2 * (2.2 - 1)
    assert model_start(9.0) == 5.0


def test_a_draft_model_with_small_windows_may_read_before_its_first_round():
    assert model_start(1.5, reading=1.9) == 2 * (1.5 - 1) + 1.9
    assert model_start(2.2, reading=2.9) == 5.0


def test_a_first_block_that_fails_leaves_enough_for_another():
    reading, costs = 2.2, [1.0, 1.36, 1.72, 2.08, 2.44, 2.8, 3.16, 3.52, 3.88]
    account = SpeculationAccount(Fallback(), start=4.0)
    with_reading = [costs[0], *(cost + reading for cost in costs[1:])]
    window = account.admit(with_reading, 0.8)
    assert window > 1
    account.settle(window, 0, with_reading[window])
    assert account.admit(costs, 0.8) > 0


def test_the_more_likely_a_block_is_the_more_it_may_stake():
    windows = [SpeculationAccount(Fallback(), 1.5).admit(INT4, chance) for chance in (0.1, 0.5, 0.8, 1.0)]
    assert windows == sorted(windows)
    assert windows[0] == 1 < windows[-1]


def test_what_cannot_pay_for_one_draft_cools_down():
    account = SpeculationAccount(Fallback(cooldown_rounds=2), start=0.3)
    assert account.admit([1.0, 1.4]) == 0
    assert account.waiting
    assert SpeculationAccount(Fallback(), start=0.5).admit([1.0, 1.25, 1.25, 1.5], 0.9) == 2


def test_predictable_text_is_never_held_back():
    _, drafted = run(SpeculationAccount(Fallback()), lambda _: 8, 400)
    assert 400 // 9 <= drafted <= 400 // 9 + 6  # windows are whole after a few rounds


def test_speculation_comes_back_when_the_text_becomes_predictable():
    account = SpeculationAccount(Fallback())
    run(account, lambda _: 0, 300)
    cost, _ = run(account, lambda _: 8, 600)
    assert cost < 600 * 0.8


def test_failed_probes_become_rarer():
    account = SpeculationAccount(Fallback(cooldown_rounds=4, max_cooldown_rounds=64, max_overhead=0.3))
    _, early = run(account, lambda _: 0, 200)
    _, late = run(account, lambda _: 0, 200)
    assert 0 < late < early


@given(st.lists(st.floats(0, 2), min_size=1, max_size=16), st.floats(0, 1), st.floats(0, 12))
def test_whatever_the_chance_a_failed_block_is_covered(rises, chance, balance):
    costs = [1.0]
    for rise in rises:
        costs.append(costs[-1] + rise)
    account = SpeculationAccount(Fallback(), start=balance)
    window = account.admit(costs, chance)
    assert (window == 0) == (account.waiting > 0)
    account.settle(window, 0, costs[window])
    assert account.balance >= -1e-9


def test_the_accounts_of_a_request_lose_together_what_is_stated():
    for n_tokens in (64, 400, 2000):
        accounts = [SpeculationAccount(Fallback(), start, 1 / 3) for start in (model_start(9.0), None, None)]
        starts = [account.balance for account in accounts]
        losses = [run(account, lambda _: 0, n_tokens)[0] - n_tokens for account in accounts]
        assert 0 < sum(losses) <= sum(starts) + ALLOWANCE * n_tokens + 1e-6
        assert sum(starts[1:]) == pytest.approx(2 / 3 * ALLOWANCE * SHORT_ANSWER)


def test_looking_is_paid_for_and_always_leaves_the_price_of_a_draft():
    account = SpeculationAccount(Fallback(), start=1.0)
    for _ in range(200):
        account.settle(0, 0, 1.0, looked=0.04, draft=0.3)
    assert account.balance == pytest.approx(0.3, abs=0.05)
    account.settle(1, 0, 1.3, looked=0.04, draft=0.3)
    spent = account.balance
    assert spent < 0.05
    account.settle(0, 0, 1.0, looked=0.04, draft=0.3)
    assert account.balance == pytest.approx(spent + ALLOWANCE)


def test_looking_costs_nothing_lasting_where_steps_are_long():
    account = SpeculationAccount(Fallback(), start=1.0)
    for _ in range(4000):
        account.settle(0, 0, 1.0, looked=0.004, draft=0.3)
    assert account.balance == pytest.approx(12.0, abs=0.01)


@given(st.integers(0, 40), st.floats(-1, 12))
def test_a_rest_is_a_plain_round(rounds, balance):
    one, other = (SpeculationAccount(Fallback(), start=balance) for _ in range(2))
    for account in (one, other):
        account.admit([1.0, 99.0])  # begins a cool-down
    assert one.waiting > 0
    for _ in range(rounds):
        one.rest(1)
        other.settle(0, 0, 1.0)
    assert one.waiting == other.waiting
    assert one.balance == pytest.approx(other.balance)
