"""Costs of rounds, corrected by what rounds really took."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dsc.bundle_schema.dflash_config import MAX_WINDOW
from dsc.runtime.acceptance import RoundCosts

_MOST_AT_ONCE = 2.0
_STILL_BELIEVED = 0.8


class Ratios:
    """How many times as long as a curve says something took, by its number of rows or drafts.

    Args:
        weight: of the newest measurement; the first ones count alike, so that none of them has more than its share.
    """

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._known: dict[int, tuple[float, int]] = {}  # count -> mean, measurements
        self._ran: set[int] = set()
        self._fresh: set[int] = set()  # measured in this request

    def observe(self, count: int, ratio: float) -> None:
        """One measurement."""
        mean, n = self._known.get(count, (0.0, 0))
        self._known[count] = (mean + max(self._weight, 1 / (n + 1)) * (ratio - mean), n + 1)

    def follow(self, count: int, ratio: float) -> None:
        """One measurement by which it is decided whether the same is done again.

        What seems too dear is not done, and so not measured again. So the first run of a count, which prepares memory
        and fetches weights, does not count, and one measurement at most doubles what was known.
        """
        if count in self._ran:
            mean, _ = self._known.get(count, (1.0, 0))
            self.observe(count, min(ratio, _MOST_AT_ONCE * mean))
            self._fresh.add(count)
        self._ran.add(count)

    def age(self) -> None:
        """A request begins: what the last one did not measure is believed less."""
        for count in self._known.keys() - self._fresh:
            mean, n = self._known[count]
            self._known[count] = (1 + _STILL_BELIEVED * (mean - 1), n)
        self._fresh.clear()

    def correct(self, curve: tuple[float, ...]) -> tuple[float, ...]:
        """`curve`, each entry scaled like the nearest one that was measured."""
        if not self._known:
            return curve
        known = sorted(self._known)
        nearest = [min(known, key=lambda count: abs(count - place)) for place in range(1, len(curve) + 1)]
        return tuple(ms * self._known[count][0] for ms, count in zip(curve, nearest, strict=True))


class LiveCosts:
    """A measured or assumed curve, followed by the measurements of this run.

    Args:
        verify_ms: milliseconds of a target forward over 1, 2, ... rows.
        draft_ms: of proposing 1, 2, ... tokens; empty when it costs nothing.
        host_ms: of everything else in a round.
        weight: of the newest measurement.
        read_ms: of the draft reading one token of a long text; 0 when that is not known.
        earlier: costs whose measurements, of other contexts, hold here too and are added to.
        late_ms: of proposing 1, 2, ... tokens by a draft that has read only the end of the text; `draft_ms` when empty.
    """

    def __init__(
        self,
        verify_ms: Sequence[float],
        draft_ms: Sequence[float],
        host_ms: float,
        weight: float,
        read_ms: float = 0.0,
        earlier: LiveCosts | None = None,
        late_ms: Sequence[float] = (),
    ) -> None:
        self._verify = tuple(verify_ms)
        self._draft = tuple(draft_ms)
        self._late = tuple(late_ms) or self._draft
        self._host = host_ms
        self._read_ms = read_ms
        self._verify_ratios: Ratios = earlier._verify_ratios if earlier else Ratios(weight)
        self._draft_ratios: Ratios = earlier._draft_ratios if earlier else Ratios(weight)

    def observe(self, rows: int, forward_ms: float, drafted: int = 0, draft_ms: float = 0.0) -> None:
        """One round that was: a forward over `rows` rows, and proposing `drafted` tokens."""
        self._book(Ratios.observe, rows, forward_ms, drafted, draft_ms)

    def follow(self, rows: int, forward_ms: float, drafted: int = 0, draft_ms: float = 0.0) -> None:
        """As `observe`, of a round on which the next ones depend; see `Ratios.follow`."""
        self._book(Ratios.follow, rows, forward_ms, drafted, draft_ms)

    def _book(
        self, book: Callable[[Ratios, int, float], None], rows: int, forward_ms: float, drafted: int, draft_ms: float
    ) -> None:
        if 1 <= rows <= len(self._verify) and self._verify[rows - 1] > 0:
            book(self._verify_ratios, rows, forward_ms / self._verify[rows - 1])
        if 1 <= drafted <= len(self._draft) and self._draft[drafted - 1] > 0:
            book(self._draft_ratios, drafted, draft_ms / self._draft[drafted - 1])

    def age(self) -> None:
        """A request begins; see `Ratios.age`."""
        self._verify_ratios.age()
        self._draft_ratios.age()

    def verify_ms(self) -> tuple[float, ...]:
        """The corrected curve of forwards."""
        return self._verify_ratios.correct(self._verify)

    def draft_ms(self) -> tuple[float, ...]:
        """The corrected curve of proposing."""
        return self._draft_ratios.correct(self._draft)

    def costs(self, late: bool = False, smooth: bool = True) -> RoundCosts:
        """In plain decoding steps; of a draft that started late, and see `RoundCosts.from_ms`."""
        (read_ms,) = self._draft_ratios.correct((self._read_ms,))
        draft_ms = self._draft_ratios.correct(self._late) if late else self.draft_ms()
        return RoundCosts.from_ms(self.verify_ms(), draft_ms, self._host, read_ms, smooth)


def round_table(costs: RoundCosts) -> list[float]:
    """Costs of rounds with 0, 1, .. 16 drafts."""
    return costs.rounds(0, MAX_WINDOW)
