"""Microseconds of one scheduling decision, by policy, and of reading the signals; prints medians.

A decision is what `Policy.choose` does with three proposers' offers of up to 8 drafts. The second column is everything
that `Speculator.propose` does around it for prompt lookup and a draft model that drafts nothing: looking up in 2,000
tokens, offers, accounts. The other columns are what weighing the intents of 4 and of 8 sequences together adds to an
engine's round, where the policy does that: with drafts good enough that nearly all are admitted, which takes longest.
The last line is the signals' share: top three of a row of 49,152 logits and their averages.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import numpy as np

from dsc.bundle_schema.dflash_config import DflashConfig, apply_override
from dsc.runtime.acceptance import AcceptanceModel
from dsc.runtime.proposers import NgramProposer
from dsc.runtime.schedule_config import LiveConfig
from dsc.runtime.schedule_costs import LiveCosts, round_table
from dsc.runtime.schedule_policy import Offer, make_policy
from dsc.runtime.schedule_rules import History
from dsc.runtime.shared_round import admitted_windows
from dsc.runtime.signals import SignalMeter, Signals
from dsc.runtime.speculator import Intent, SpeculationOptions, Speculator

VERIFY_MS = [10 + 0.8 * rows for rows in range(16)]
DRAFT_MS = [4.0 * drafts for drafts in range(1, 17)]
REPEATS = 2000
BATCHES = (4, 8)
JOINT = ("calibrated", "batched")


def microseconds(call: Callable[[], object]) -> float:
    """Median time of a call."""
    times = []
    for _ in range(REPEATS):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return median(times) * 1e6


class SilentDraft(NgramProposer):
    """A model's place in the table, without a model: copies one token."""

    kind = "model"
    sizes_blocks = False

    def look(self, tokens: object) -> str:
        return "1 only"

    def propose(self, tokens: object, count: int) -> list[int]:
        return [0] * count


def joint_us(config: DflashConfig, n_sequences: int) -> float:
    """Of admitting the drafts of so many sequences, whose acceptance differs."""
    costs = LiveCosts(VERIFY_MS, (), 0.2, 0.1).costs()
    table = round_table(costs)
    shares = [0.9 + 0.01 * row for row in range(n_sequences)]
    offers = [Offer(1, 8, AcceptanceModel(share, share), table, lookup=True) for share in shares]
    intents = [Intent(offer, 8, joint=True) for offer in offers]
    lanes = config.batched if config.policy == "batched" else None
    return microseconds(lambda: admitted_windows(intents, costs, n_sequences, lanes))


def main() -> None:
    signals = Signals(0.1, 0.5, 0.9, 0.6, 0.5, 0.95)
    tables = [round_table(LiveCosts(VERIFY_MS, draft, 0.2, 0.1).costs()) for draft in (DRAFT_MS, (), ())]
    offers = [Offer(lane, 8, AcceptanceModel(), table, lane > 0) for lane, table in enumerate(tables)]
    tokens = np.random.default_rng(0).integers(0, 200, 2000).tolist()
    columns = ("choose us", "propose us", *(f"{n} together" for n in BATCHES))
    print(f"{'policy':12}" + "".join(f"{name:>12}" for name in columns))
    for name in ("fixed", "rules", "calibrated", "batched"):
        config = apply_override(DflashConfig(), {"policy": name})
        policy = make_policy(config)
        choose = microseconds(lambda policy=policy: policy.choose(offers, signals, History()))
        proposers = [(SilentDraft(), LiveCosts(VERIFY_MS, DRAFT_MS, 0.2, 0.1))]
        proposers.append((NgramProposer(), LiveCosts(VERIFY_MS, (), 0.2, 0.1)))
        options = SpeculationOptions(fallback=False)
        speculator = Speculator(proposers, options, LiveConfig(config), 100)
        propose = microseconds(lambda speculator=speculator: speculator.propose(tokens, 100))
        joint = [joint_us(config, n) for n in BATCHES] if name in JOINT else []
        print(f"{name:12}" + "".join(f"{us:12.1f}" for us in (choose, propose, *joint)))
    meter = SignalMeter(DflashConfig(), 100)
    row = np.random.default_rng(0).normal(size=49152).astype(np.float32)
    signals_us = microseconds(lambda: (meter.see_target(row), meter.settle(4, 2), meter.read(200)))
    print(f"signals of one row: {signals_us:.1f} us")


if __name__ == "__main__":
    main()
