"""A round of several sequences: what its rows cost together, how much of waiting prompts it reads, and which drafts it
verifies.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsc.bundle_schema.dflash_config import MAX_WINDOW, BatchedPolicy
from dsc.runtime.acceptance import RoundCosts
from dsc.runtime.schedule_admission import admitted_prefix
from dsc.runtime.speculator import Intent

LEAST_PROMPT_ROWS = 2
"""Rows of prompts that a round always has time for: who waits with a prompt must get on."""
MOST_STEADY = 2
"""Positions of a sequence besides its first that a round may admit where there are lanes."""


def prompt_rows(costs: RoundCosts, prompts: RoundCosts, decoding: int, stretch: float, most: int) -> int:
    """Rows of prompts that a round may read and take at most `stretch` times as long as without them.

    The measured curve of rows decides and no clock: reading in other pieces changes no output, but the same requests
    are read in the same pieces on every run.

    Args:
        costs: of rounds without a draft model, at the context of the sequences that decode.
        prompts: the same at the context of the prompts, whose rows take longer where it is long.
        decoding: sequences of the round that wait for their next token; without any the rows are free.
        most: rows of one forward.
    """
    if decoding == 0:
        return most
    allowed_ms = (stretch - 1) * costs.round(decoding - 1) * costs.step_ms
    step_ms = max(prompts.step_ms, costs.step_ms)  # a measurement that a long context is cheaper is noise
    limit = prompts.round(decoding - 1) + allowed_ms / step_ms
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if prompts.round(decoding + middle - 1) <= limit else (low, middle - 1)
    return max(low, min(LEAST_PROMPT_ROWS, most))


def fair_shares(wanted: Sequence[int], budget: int) -> list[int]:
    """Split `budget` rows so that nobody gets more than it wants and nobody less than another who wants more.

    Rows that cannot be split evenly go to the first. A short prompt is never kept waiting by a long one.
    """
    shares = [0] * len(wanted)
    for place, index in enumerate(sorted(range(len(wanted)), key=lambda i: (wanted[i], i))):
        even = -(-budget // (len(wanted) - place))
        shares[index] = min(wanted[index], even)
        budget -= shares[index]
    return shares


def admitted_windows(
    intents: Sequence[Intent], costs: RoundCosts, rows: int, policy: BatchedPolicy | None = None
) -> list[int]:
    """How many of its intended drafts each sequence has verified; what decides was known before any draft was made.

    Positions of all sequences are admitted in falling order of survival while expected committed tokens a second rise
    (`dsc.runtime.schedule_admission`). With the `batched` policy they have lanes: each sequence's first position is
    verified at once, as long as all of them add at most `fast_lane_ms` milliseconds; of the others, as few or as many
    as the share of `max_rows` that is taken allows.

    Args:
        intents: of the sequences that decode in this round.
        costs: of rounds without a draft model.
        rows: of the round besides the drafts.
        policy: of the lanes; None has no lanes.
    """
    chains, not_asked, step = _chains(intents, costs, MAX_WINDOW if policy is None else 1 + MOST_STEADY)
    rows += not_asked
    room = sum(map(len, chains))
    certain: list[int] = []
    if policy is not None:
        room = min(room, max(policy.max_rows - rows, 0))
    table = costs.rounds(rows - 1, rows - 1 + room)
    if policy is not None:
        certain = _fast_lane(chains, table, policy.fast_lane_ms / costs.step_ms)
        steady = _steady_positions((rows + sum(certain)) / policy.max_rows, policy)
        chains = [chain[: lane + steady] for chain, lane in zip(chains, certain, strict=True)]
    if step:
        table = [cost + count * step for count, cost in enumerate(table)]
    admitted = admitted_prefix(chains, table, certain)
    pairs = zip(intents, admitted, strict=True)
    return [window if intent.joint else intent.window for intent, window in pairs]


def _chains(intents: Sequence[Intent], costs: RoundCosts, most: int) -> tuple[list[Sequence[float]], int, float]:
    """Each sequence's survivals at its first `most` positions, empty where nothing is weighed; the drafts of the
    others; and what a draft of the dearest intent costs besides its row in the verification, in plain steps.
    """
    alone = costs.rounds(0, MAX_WINDOW)
    chains: list[Sequence[float]] = []
    not_asked, step = 0, 0.0
    for intent in intents:
        offer, window = intent.offer, intent.window
        if offer is None or not window or not intent.joint:
            chains.append(())
            not_asked += window
            continue
        chains.append(offer.acceptance.survivals(min(window, most)))
        step = max(step, (offer.costs[window] - alone[window]) / window)
    return chains, not_asked, step


def _fast_lane(chains: Sequence[Sequence[float]], table: Sequence[float], budget: float) -> list[int]:
    """1 for each sequence whose first position is verified in any case; the likeliest come first.

    Args:
        table: costs of the round with 0, 1, ... drafts.
        budget: what the lane may add to them.
    """
    lane = [0] * len(chains)
    order = sorted([(-chain[0], index) for index, chain in enumerate(chains) if chain])
    for (_, index), cost in zip(order, table[1:], strict=False):
        if cost - table[0] > budget:
            break
        lane[index] = 1
    return lane


def _steady_positions(load: float, policy: BatchedPolicy) -> int:
    """Positions of each sequence besides its first that a round may admit."""
    if load < policy.light_load:
        return MOST_STEADY
    return 1 if load <= policy.heavy_load else 0
