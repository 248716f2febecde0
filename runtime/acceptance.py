"""What a round of speculation is expected to give and to cost, in units of one plain decoding step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

_LEAST_RISE = 0.01  # that a further row or draft costs at least, in first ones


@dataclass
class _Share:
    """A share of successes that forgets: a Beta prior plus observations that fade."""

    successes: float
    failures: float
    prior: tuple[float, float] = field(init=False)

    def __post_init__(self) -> None:
        self.prior = (self.successes, self.failures)

    @property
    def mean(self) -> float:
        return self.successes / (self.successes + self.failures)

    def observe(self, successes: int, failures: int) -> None:
        self.successes += successes
        self.failures += failures

    def fade(self, keep: float) -> None:
        """Move `1 - keep` of the way back to the prior."""
        self.successes = self.prior[0] + keep * (self.successes - self.prior[0])
        self.failures = self.prior[1] + keep * (self.failures - self.prior[1])


class AcceptanceModel:
    """Acceptance of one kind of proposal, learnt while decoding.

    Blocks are two-humped: a wrong block fails at its first token, a right one runs on. So the first position and the
    later ones (given that all before were accepted) each have their own share.

    Args:
        first: expected share at the first position before anything was seen.
        later: the same for each further position.
        weight: how many observations that expectation is worth.
        memory: rounds after which an observation has faded to 1/e; this is what lets a proposer that did badly be tried
            again.
    """

    def __init__(self, first: float = 0.5, later: float = 0.8, weight: float = 4.0, memory: float = 40.0) -> None:
        self._first = _Share(first * weight, (1 - first) * weight)
        self._later = _Share(later * weight, (1 - later) * weight)
        self._keep = 1 - 1 / memory

    def observe(self, proposed: int, accepted: int) -> None:
        """Learn from one verified block of `proposed` drafts of which the first `accepted` held."""
        if proposed == 0:
            return
        self._first.observe(min(accepted, 1), int(accepted == 0))
        if accepted:
            self._later.observe(accepted - 1, int(accepted < proposed))

    def fade(self, rounds: int = 1) -> None:
        """So many rounds have passed."""
        keep = self._keep**rounds
        self._first.fade(keep)
        self._later.fade(keep)

    def survivals(self, limit: int) -> list[float]:
        """Probability that all drafts up to position 1, 2, .. `limit` are accepted."""
        survival, later = self._first.mean, self._later.mean
        chain = []
        for _ in range(limit):
            chain.append(survival)
            survival *= later
        return chain

    def expected(self, limit: int) -> Iterator[float]:
        """Expected tokens committed by a round with 1, 2, .. `limit` drafts, the correction or bonus token included."""
        total = 1.0
        for survival in self.survivals(limit):
            total += survival
            yield total


@dataclass(frozen=True)
class RoundCosts:
    """Measured costs in units of one plain decoding step of the target.

    Attributes:
        verify: cost of a target forward with 1, 2, 3, ... rows; the first entry is 1.
        draft: cost of proposing 1, 2, 3, ... tokens; empty when it costs nothing.
        step_ms: milliseconds of a plain step.
        read: cost of the draft reading a token of a long text; 0 when that is not known.
    """

    verify: tuple[float, ...]
    draft: tuple[float, ...] = ()
    step_ms: float = 1.0
    read: float = 0.0

    def round(self, window: int) -> float:
        """Cost of a round with `window` drafts."""
        return _extend(self.verify, window + 1) + self.drafting(window)

    def rounds(self, fewest: int, most: int) -> list[float]:
        """Costs of rounds with `fewest` to `most` drafts."""
        costs = _entries(self.verify, fewest + 1, most + 1)
        if not self.draft:
            return costs
        return [cost + self.drafting(window) for window, cost in enumerate(costs, fewest)]

    def catch_up(self, rows: int) -> float:
        """Cost of the draft reading `rows` tokens beside the first: as measured on a long text where there are many;
        otherwise rows cost it what they cost the target, in share.
        """
        if self.read and rows > len(self.verify):
            return self.read * rows
        return self.drafting(1) * (_extend(self.verify, rows + 1) - 1)

    def drafting(self, window: int) -> float:
        """Cost of proposing `window` tokens."""
        return _extend(self.draft, window) if self.draft and window else 0.0

    @classmethod
    def from_ms(
        cls,
        verify_ms: Sequence[float],
        draft_ms: Sequence[float] = (),
        host_ms: float = 0.0,
        read_ms: float = 0.0,
        smooth: bool = True,
    ) -> RoundCosts:
        """Costs from milliseconds of a target forward with 1, 2, ... rows, and of proposing 1, 2, ... tokens.

        Args:
            host_ms: the rest of a round; it is part of a plain step as well.
            read_ms: of the draft reading one token of a long text.
            smooth: measurements that say that more work is cheaper, or free, are noise; otherwise they count as
                they are.
        """
        shaped: Callable[[Sequence[float]], tuple[float, ...]] = _rising if smooth else tuple
        verify = shaped([ms + host_ms for ms in verify_ms])
        step = verify[0]
        draft = shaped(draft_ms)
        return cls(tuple(ms / step for ms in verify), tuple(ms / step for ms in draft), step, read_ms / step)


def _rising(costs: Sequence[float]) -> tuple[float, ...]:
    """More work cannot be cheaper: neighbours that say so are noise and share their mean (pool adjacent violators).
    Nor is any of it free, or long blocks that always fail would cost nothing.
    """
    pools: list[tuple[float, int]] = []
    for cost in costs:
        mean, size = cost, 1
        while pools and pools[-1][0] > mean:
            before, n_before = pools.pop()
            mean, size = (before * n_before + mean * size) / (n_before + size), n_before + size
        pools.append((mean, size))
    shared = [mean for mean, size in pools for _ in range(size)]
    return tuple(accumulate(shared, lambda before, cost: max(cost, before + _LEAST_RISE * shared[0])))


def _extend(costs: tuple[float, ...], count: int) -> float:
    """Entry `count`, counted from 1; past the end the last slope goes on."""
    return costs[count - 1] if count <= len(costs) else _entries(costs, count, count)[0]


def _entries(costs: tuple[float, ...], first: int, last: int) -> list[float]:
    """Entries `first` to `last`, counted from 1; past the end the last slope goes on."""
    known = len(costs)
    entries = list(costs[first - 1 : last])
    if last > known:
        end = costs[-1]
        slope = end - costs[-2] if known > 1 else end
        entries += [end + beyond * slope for beyond in range(max(first - known, 1), last - known + 1)]
    return entries
