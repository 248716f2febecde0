"""Which draft positions of which sequences share a verification (DSpark, arXiv 2607.05147, Algorithm 1).

Positions are admitted in falling order of survival while expected committed tokens a second rise, and admission stops
at the first fall. The stop is what keeps it lossless where drafts are sampled: position k is admitted from survivals of
positions up to k alone. Looking further, for a later rise, would let what comes after a token decide whether that token
is verified.
"""

from __future__ import annotations

from collections.abc import Sequence


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
    chains = list(enumerate(survivals))
    order = sorted((-share, place, row) for row, chain in chains for place, share in enumerate(chain, 1))
    tokens = len(survivals) + sum(sum(chain[: admitted[row]]) for row, chain in chains)
    first = sum(admitted)
    order = [entry for entry in order if entry[1] > admitted[entry[2]]][: max(len(costs) - 1 - first, 0)]
    best = tokens / costs[min(first, len(costs) - 1)]
    for count, (negative, place, row) in enumerate(order, first + 1):
        tokens -= negative
        rate = tokens / costs[count]
        if rate <= best:
            break
        best = rate
        admitted[row] = place
    return admitted
