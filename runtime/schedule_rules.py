"""The dynamic window controller and the path selector: tables that turn signals into a window and a kind of proposer.

The window starts from the share of generated tokens, grows where the draft is steady or sure, and is locked small while
drafts fail. Nothing here looks at the tokens about to be drafted, so the choice cannot change the output's
distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dsc.bundle_schema.dflash_config import DflashConfig, PathRule, PathSelector, RulesPolicy, Windows
from dsc.runtime.signals import Signals

Path = Literal["fast", "slow", "burst"]


@dataclass(frozen=True)
class History:
    """How the rounds with drafts went.

    Attributes:
        failure: exponential moving average of the rejected share.
        locked: drafts failed too often, and not enough rounds in a row have succeeded since.
        streak: rounds in a row in which nothing was rejected, counted while locked.
    """

    failure: float = 0.0
    locked: bool = False
    streak: int = 0

    def after(self, rules: RulesPolicy, proposed: int, accepted: int) -> History:
        """The history once a round is over; rounds without drafts do not count."""
        if proposed == 0:
            return self
        weight = 2 / (rules.failure_rounds + 1)
        failure = (1 - weight) * self.failure + weight * (proposed - accepted) / proposed
        streak = self.streak + 1 if self.locked and accepted == proposed else 0
        if self.locked and streak >= rules.unlock_rounds:
            return History()  # what was forgiven must not lock it again at once
        return History(failure, self.locked or failure > rules.failure_rate, streak)


def rules_window(rules: RulesPolicy, windows: Windows, signals: Signals, history: History) -> int:
    """The next round's window, within `windows`."""
    if history.locked:
        return min(rules.locked_window, windows.max)
    window = _by_share(rules, signals.plnp)
    if signals.entropy is not None and signals.entropy < rules.low_entropy and signals.kv_hit_rate > rules.kv_hit_rate:
        window = max(window, rules.sure_window)
    if signals.slope is not None and signals.slope < rules.flat_slope:
        window += 1
    return min(max(window, windows.min), windows.max)


def _by_share(rules: RulesPolicy, plnp: float) -> int:
    """The window for generated / prompt tokens; between the bounds it rises from the first to the second value."""
    if plnp < rules.short_plnp:
        return rules.short_window
    if plnp > rules.long_plnp:
        return rules.long_window
    low, high = rules.middle_windows
    width = rules.long_plnp - rules.short_plnp
    return low + round((high - low) * (plnp - rules.short_plnp) / width) if width else low


def choose_path(selector: PathSelector, signals: Signals) -> Path:
    """The first row of the table whose bounds all hold; ``burst`` before there are signals and past the table.

    No graph gives the variance of attention yet, so bounds on it hold.
    """
    if signals.entropy_ratio is None or signals.gap is None:
        return "burst"
    rows = (rule.path for rule in selector.rules if _holds(rule, signals.entropy_ratio, signals.gap))
    return next(rows, "burst")


def _holds(rule: PathRule, entropy_ratio: float, gap: float) -> bool:
    return entropy_ratio <= rule.max_entropy_ratio and gap >= rule.min_gap


def wants_signals(config: DflashConfig) -> bool:
    """Only the `rules` policy reads them."""
    return config.policy == "rules"
