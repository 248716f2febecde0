"""Policies: which proposer drafts next, and how many tokens.

A policy is a pure function of what it is given: the same offers, signals and history give the same choice. All of it
was known before the round, which keeps sampling lossless whatever is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dsc.bundle_schema.dflash_config import DflashConfig
from dsc.runtime.acceptance import AcceptanceModel
from dsc.runtime.schedule_rules import History, choose_path, rules_window
from dsc.runtime.signals import Signals

UNPAID = "does not pay"


class Offer(NamedTuple):
    """What one proposer can do in the next round.

    Attributes:
        lane: index of the proposer.
        limit: most drafts, at least 1.
        acceptance: what to expect of them.
        costs: entry k is the cost of a round with k drafts in plain decoding steps; `limit` + 1 entries or more.
        lookup: it copies what was there before and computes nothing; its blocks differ so much in quality that a fixed
            window is never right.
    """

    lane: int
    limit: int
    acceptance: AcceptanceModel
    costs: Sequence[float]
    lookup: bool


class Choice(NamedTuple):
    """A policy's decision; window 0 is plain decoding."""

    offer: Offer | None = None
    window: int = 0
    reason: str = ""


class Policy(Protocol):
    """Chooses among the offers of a round."""

    def choose(self, offers: Sequence[Offer], signals: Signals, history: History) -> Choice:
        """`offers` has at least one element, the bundle's own draft first."""


def best_window(offer: Offer) -> tuple[int, float]:
    """The window with the most expected tokens per plain step, and how many; 0 is plain decoding, which has 1."""
    window, best = 0, 1.0
    costs = offer.costs
    for drafts, tokens in enumerate(offer.acceptance.expected(offer.limit), 1):
        rate = tokens / costs[drafts]
        if rate > best:
            window, best = drafts, rate
    return window, best


def admitted_window(offer: Offer) -> tuple[int, float]:
    """The window up to which each draft raises the expected tokens per plain step, and how many they are: what
    `dsc.runtime.schedule_admission` admits of one sequence, so nothing past the first fall is looked at.
    """
    window, best = 0, 1.0
    costs = offer.costs
    for drafts, tokens in enumerate(offer.acceptance.expected(offer.limit), 1):
        rate = tokens / costs[drafts]
        if rate <= best:
            break
        window, best = drafts, rate
    return window, best


def _highest_rate(offers: Sequence[Offer], size: Callable[[Offer], tuple[int, float]], least: float) -> Choice:
    """The offer with most tokens per plain step in the window that `size` finds for it, if those are over `least`."""
    best, window, rate = offers[0], 0, least
    for offer in offers:
        found, gain = size(offer)
        if found and gain > rate:
            best, window, rate = offer, found, gain
    return Choice(best, window, "" if window else UNPAID)


@dataclass(frozen=True)
class CalibratedPolicy:
    """Most expected committed tokens a second, over proposers and windows."""

    min_gain: float = 0.0

    def choose(self, offers: Sequence[Offer], signals: Signals, history: History) -> Choice:
        """The offer and window with the highest rate, if it is worth leaving plain decoding for."""
        return _highest_rate(offers, best_window, 1.0 + self.min_gain)


@dataclass(frozen=True)
class FixedPolicy:
    """Always the first proposer and the same window; lookups are sized by what they are worth unless `strict`."""

    window: int
    strict: bool = False

    def choose(self, offers: Sequence[Offer], signals: Signals, history: History) -> Choice:
        """The first offer."""
        if offers[0].lookup and not self.strict:
            return CalibratedPolicy().choose(offers[:1], signals, history)
        return Choice(offers[0], min(self.window, offers[0].limit))


@dataclass(frozen=True)
class RulesPolicy:
    """The path selector names the kind of proposer, the dynamic window controller the window."""

    config: DflashConfig

    def choose(self, offers: Sequence[Offer], signals: Signals, history: History) -> Choice:
        """By the configuration's tables."""
        config = self.config
        path = choose_path(config.selector, signals) if config.selector.enabled else "burst"
        if path == "slow":
            return Choice(offers[0], 0, "slow path")
        wanted = [offer for offer in offers if offer.lookup == (path == "fast")]
        offer = (wanted or offers)[0]
        window = rules_window(config.rules, config.windows, signals, history)
        if config.selector.enabled and not offer.lookup:
            window = min(window, config.selector.burst_steps)
        return Choice(offer, min(window, offer.limit))


@dataclass(frozen=True)
class BatchedPolicy:
    """Prefix admission: each offer's positions are admitted while expected tokens a second rise."""

    def choose(self, offers: Sequence[Offer], signals: Signals, history: History) -> Choice:
        """The offer whose admitted prefix is worth most."""
        return _highest_rate(offers, admitted_window, 1.0)


def make_policy(config: DflashConfig, window: int | None = None) -> Policy:
    """The configured policy; a `window` that the request names is taken as it is."""
    if window is not None:
        return FixedPolicy(window, strict=True)
    if config.policy == "rules":
        return RulesPolicy(config)
    if config.policy == "calibrated":
        return CalibratedPolicy(config.calibrated.min_gain)
    if config.policy == "batched":
        return BatchedPolicy()
    return FixedPolicy(config.windows.default)
