"""The dynamic window controller and the path selector, row by row."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsc.bundle_schema.dflash_config import DflashConfig, PathRule, PathSelector, RulesPolicy, Windows, apply_override
from dsc.runtime.schedule_rules import History, choose_path, rules_window
from dsc.runtime.signals import Signals

RULES, WINDOWS, FRESH = RulesPolicy(), Windows(), History()


def window(history=FRESH, **signals) -> int:
    return rules_window(RULES, WINDOWS, Signals(**signals), history)


@pytest.mark.parametrize(("plnp", "expected"), [(0.0, 4), (0.29, 4), (0.3, 6), (0.5, 7), (0.7, 8), (0.71, 3), (9.0, 3)])
def test_the_share_of_generated_tokens_sets_the_window(plnp, expected):
    assert window(plnp=plnp) == expected


def test_low_entropy_with_a_good_hit_rate_goes_from_four_to_six():
    assert window(entropy=0.84, kv_hit_rate=0.93) == 6
    assert window(entropy=0.86, kv_hit_rate=0.93) == 4
    assert window(entropy=0.84, kv_hit_rate=0.92) == 4
    assert window(entropy=0.84, kv_hit_rate=0.93, plnp=0.7) == 8


def test_a_steady_draft_widens_by_one_within_the_bounds():
    assert window(slope=0.14) == 5
    assert window(slope=0.15) == 4
    assert window(slope=0.0, plnp=0.7) == 8
    assert window(slope=0.0, entropy=0.1) == 7


def test_failures_lock_the_window_until_five_rounds_in_a_row_succeed():
    history = History()
    for _ in range(2):
        history = history.after(RULES, 4, 0)
    assert history.locked
    assert window(history, entropy=0.1, slope=0.0) == 2
    for accepted in (2, 2, 2, 2, 1):  # the fifth fails and the count starts again
        history = history.after(RULES, 2, accepted)
    assert history.locked
    for _ in range(4):
        history = history.after(RULES, 2, 2)
    assert history.locked
    assert not history.after(RULES, 2, 2).locked


def test_the_failure_average_spans_ten_rounds():
    history = History().after(RULES, 4, 0)
    assert history.failure == pytest.approx(2 / 11)
    assert history.after(RULES, 4, 2).failure == pytest.approx(9 / 11 * 2 / 11 + 2 / 11 * 0.5)
    assert history.after(RULES, 0, 0) == history


def test_every_threshold_is_the_configuration_s():
    config = apply_override(
        DflashConfig(),
        {"rules.short_window": 7, "rules.flat_slope": 0.5, "rules.failure_rate": 0.01, "rules.locked_window": 3},
    )
    assert rules_window(config.rules, config.windows, Signals(slope=0.4), History()) == 8
    locked = History().after(config.rules, 4, 3)
    assert rules_window(config.rules, config.windows, Signals(), locked) == 3


@given(
    st.builds(
        Signals,
        slope=st.none() | st.floats(0, 5),
        entropy=st.none() | st.floats(0, 1.1),
        plnp=st.floats(0, 50),
        kv_hit_rate=st.floats(0, 1),
    ),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=30),
)
def test_the_window_stays_within_its_bounds(signals, rounds):
    history = History()
    for proposed, accepted in rounds:
        history = history.after(RULES, proposed, min(proposed, accepted))
    assert 2 <= rules_window(RULES, WINDOWS, signals, history) <= 8


@pytest.mark.parametrize(
    ("ratio", "gap", "path"),
    [(0.5, 0.9, "fast"), (0.5, 0.7, "burst"), (1.5, 0.1, "burst"), (1.7, 0.9, "slow"), (None, None, "burst")],
)
def test_the_first_row_that_holds_names_the_path(ratio, gap, path):
    assert choose_path(PathSelector(), Signals(entropy_ratio=ratio, gap=gap)) == path


def test_past_the_table_the_draft_model_runs():
    selector = PathSelector(rules=(PathRule(path="slow", max_entropy_ratio=0.1),))
    assert choose_path(selector, Signals(entropy_ratio=1.0, gap=0.5)) == "burst"
