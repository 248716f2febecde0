"""The exact law of a verdict and of the tokens that it lets out, found by bisection.

No formula of a rule under test is used: it is a function of uniforms, each of which passes its draft below some
threshold, so the thresholds are looked for, and every combination of passing and failing is tried with its probability.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

Array = Any
Prefix = tuple[int, ...]
Law = dict[Prefix, float]
VerdictLaw = dict[tuple[Prefix, int], float]
# uniforms [M, n + 1] -> drafts that hold, bool [M, n], and the tokens that follow [M]
Judge = Callable[[Array], tuple[Array, Array]]

TOP = float(np.nextafter(np.float32(1), np.float32(0)))
_HALVINGS = 26
ACCURACY = 1e-6


def plain_distribution(row: Sequence[float], temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> Array:
    """Plain sampling's distribution of one row, token by token in Python floats; equal logits stay together."""
    logits = [float(x) for x in row]
    weight = [np.exp((x - max(logits)) / temperature) for x in logits]
    kept = sorted(set(logits), reverse=True)  # the distinct logits that stay
    if 0 < top_k < len(logits):
        kept = [x for x in kept if sum(y > x for y in logits) < top_k]
    if top_p < 1:
        goal = top_p * sum(w for w, x in zip(weight, logits, strict=True) if x in kept)
        kept = [x for x in kept if sum(w for w, y in zip(weight, logits, strict=True) if y in kept and y > x) < goal]
    weight = [w if x in kept and w >= min_p else 0.0 for w, x in zip(weight, logits, strict=True)]
    return np.array(weight) / sum(weight)


@dataclass(frozen=True)
class TableModel:
    """A language model with a row of logits for every text of up to some length."""

    vocab: int
    rows: dict[Prefix, Array]
    filters: dict[str, float] = field(default_factory=dict)

    def probs(self, prefix: Prefix) -> Array:
        """What the next token is sampled from."""
        return plain_distribution(self.rows[prefix], **self.filters)

    def law(self, length: int, before: Prefix = ()) -> Iterator[tuple[Prefix, float]]:
        """Every continuation of this length with its probability."""
        if length == 0:
            yield (), 1.0
            return
        for token, share in enumerate(self.probs(before)):
            for rest, p in self.law(length - 1, (*before, token)):
                yield (token, *rest), share * p


def random_model(seed: int, vocab: int, depth: int, **filters: float) -> TableModel:
    """Rows that differ from prefix to prefix."""
    rng = np.random.default_rng(seed)
    prefixes = [prefix for n in range(depth + 1) for prefix in product(range(vocab), repeat=n)]
    rows = {prefix: (1.5 * rng.standard_normal(vocab)).astype(np.float32) for prefix in prefixes}
    return TableModel(vocab, rows, filters)


def near_model(seed: int, model: TableModel, distance: float) -> TableModel:
    """A proposal whose rows are a target's with noise."""
    rng = np.random.default_rng(seed)
    noise = {prefix: rng.normal(0, distance, model.vocab) for prefix in model.rows}
    return TableModel(
        model.vocab, {prefix: (row + noise[prefix]).astype(np.float32) for prefix, row in model.rows.items()}
    )


def verdict_law(judge: Judge, ancestors: Sequence[Sequence[int]], vocab: int) -> VerdictLaw:
    """Probability of (drafts that hold, token that follows) over independent uniforms.

    Args:
        ancestors: for each draft those that must hold before it is looked at.
    """
    n = len(ancestors)
    base, each = np.full((n, n + 1), TOP), np.arange(n)
    for i, before in enumerate(ancestors):
        base[i, list(before)] = 0

    def passes(at: Array) -> Array:
        uniforms = base.copy()
        uniforms[each, each] = at
        return judge(uniforms)[0][each, each]

    thresholds = _bisect(passes, n) if n else np.empty(0)
    outcomes = np.array(list(product([False, True], repeat=n)))
    tests = np.where(outcomes, thresholds / 2, (1 + thresholds) / 2)
    chances = np.where(outcomes, thresholds, 1 - thresholds).prod(axis=1)
    held = judge(np.column_stack([tests, np.full(len(tests), 0.5)]))[0]
    rows, tokens = np.repeat(tests, vocab - 1, axis=0), np.tile(np.arange(vocab - 1), len(tests))
    below = _bisect(lambda at: judge(np.column_stack([rows, at]))[1] <= tokens, len(rows))
    shares = np.diff(below.reshape(-1, vocab - 1), axis=1, prepend=0, append=1)
    law: VerdictLaw = defaultdict(float)
    for chance, drafts, row in zip(chances, held, shares, strict=True):
        for token, share in enumerate(row):
            law[tuple(np.flatnonzero(drafts).tolist()), token] += chance * share
    return law


def _bisect(holds: Callable[[Array], Array], size: int) -> Array:
    """The thresholds in [0, 1] below which `holds`."""
    low, high = np.zeros(size), np.ones(size)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        good = holds(middle)
        low, high = np.where(good, middle, low), np.where(good, high, middle)
    return (low + high) / 2


def emitted_law(
    target: TableModel, proposal: TableModel | None, n_drafts: int, judged: Callable[[Prefix], VerdictLaw]
) -> Law:
    """The law of the first n_drafts + 1 tokens when a block is drafted, judged and then continued plainly.

    Args:
        proposal: what the drafts are sampled from; None drafts each row's second most likely token.
        judged: drafts -> the law of their verdict.
    """
    law: Law = defaultdict(float)
    for drafts, chance in drafts_of(target, proposal, n_drafts):
        for (held, token), share in judged(drafts).items():
            emitted = (*drafts[: len(held)], token)
            for rest, p in target.law(n_drafts + 1 - len(emitted), emitted):
                law[(*emitted, *rest)] += chance * share * p
    return law


def drafts_of(target: TableModel, proposal: TableModel | None, n_drafts: int) -> list[tuple[Prefix, float]]:
    """Every block of drafts that can be proposed with its probability."""
    if proposal is not None:
        return [(drafts, chance) for drafts, chance in proposal.law(n_drafts) if chance > 0]
    drafts: Prefix = ()
    while len(drafts) < n_drafts:
        drafts = (*drafts, int(np.argsort(target.rows[drafts])[-2]))
    return [(drafts, 1.0)]


def total_variation(one: Law, other: Law) -> float:
    """Half the sum of absolute differences."""
    return 0.5 * sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})
