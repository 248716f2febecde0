"""Which draft positions of which sequences share a verification (DSpark, arXiv 2607.05147, Algorithm 1).

Positions are admitted in falling order of survival while expected committed tokens a second rise, and admission stops
at the first fall. The stop is what keeps it lossless where drafts are sampled: position k is admitted from survivals of
positions up to k alone. Looking further, for a later rise, would let what comes after a token decide whether that token
is verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace


def admitted_prefix(
    survivals: Sequence[Sequence[float]], costs: Sequence[float], certain: Sequence[int] = ()
) -> list[int]:
    """How many draft positions of each sequence to verify.

    Args:
        survivals: per sequence, the probability that all drafts up to position 1, 2, ... are accepted; never rising.
        costs: entry b is the time of a round with b admitted drafts besides one row a sequence; as many as it has
            entries are considered.
        certain: positions of each sequence that are verified in any case; 0 when empty.
    """
    admitted = list(certain) or [0] * len(survivals)
    chains = list(zip(survivals, admitted, strict=True))
    # The next position of each sequence, the likeliest first: chains never rise, so none is behind a likelier one.
    heap = [(-chain[n], n + 1, row) for row, (chain, n) in enumerate(chains) if n < len(chain)]
    heapify(heap)
    tokens = len(survivals) + sum(sum(chain[:n]) for chain, n in chains)
    first = sum(admitted)
    best = tokens / costs[min(first, len(costs) - 1)]
    for cost in costs[first + 1 :]:
        if not heap:
            break
        negative, place, row = heap[0]
        tokens -= negative
        rate = tokens / cost
        if rate <= best:
            break
        best = rate
        admitted[row] = place
        chain = survivals[row]
        if place < len(chain):
            heapreplace(heap, (-chain[place], place + 1, row))
        else:
            heappop(heap)
    return admitted
