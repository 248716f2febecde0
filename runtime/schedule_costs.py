"""Costs of rounds, corrected by what rounds really took."""

from __future__ import annotations

from collections.abc import Sequence

from dsc.bundle_schema.dflash_config import MAX_WINDOW
from dsc.runtime.acceptance import RoundCosts


class LiveCosts:
    """A measured or assumed curve, followed by the measurements of this run.

    The curve's shape is kept where nothing was measured: an unmeasured number of rows is scaled like the nearest
    measured one. One outlier moves an estimate by its weight alone.

    Args:
        verify_ms: milliseconds of a target forward over 1, 2, ... rows.
        draft_ms: of proposing 1, 2, ... tokens; empty when it costs nothing.
        host_ms: of everything else in a round.
        weight: of the newest measurement.
    """

    def __init__(self, verify_ms: Sequence[float], draft_ms: Sequence[float], host_ms: float, weight: float) -> None:
        self._verify = tuple(verify_ms)
        self._draft = tuple(draft_ms)
        self._host = host_ms
        self._weight = weight
        self._verify_ratio: dict[int, float] = {}
        self._draft_ratio: dict[int, float] = {}

    def observe(self, rows: int, forward_ms: float, drafted: int = 0, draft_ms: float = 0.0) -> None:
        """One round: a forward over `rows` rows, and proposing `drafted` tokens."""
        self._follow(self._verify_ratio, self._verify, rows, forward_ms)
        if drafted and self._draft:
            self._follow(self._draft_ratio, self._draft, drafted, draft_ms)

    def _follow(self, ratios: dict[int, float], curve: tuple[float, ...], count: int, ms: float) -> None:
        if not 1 <= count <= len(curve) or curve[count - 1] <= 0:
            return
        ratio = ms / curve[count - 1]
        known = ratios.get(count)
        ratios[count] = ratio if known is None else known + self._weight * (ratio - known)

    def verify_ms(self) -> tuple[float, ...]:
        """The corrected curve of forwards."""
        return _scaled(self._verify, self._verify_ratio)

    def draft_ms(self) -> tuple[float, ...]:
        """The corrected curve of proposing."""
        return _scaled(self._draft, self._draft_ratio)

    def costs(self) -> RoundCosts:
        """In plain decoding steps."""
        return RoundCosts.from_ms(self.verify_ms(), self.draft_ms(), self._host)


def _scaled(curve: tuple[float, ...], ratios: dict[int, float]) -> tuple[float, ...]:
    if not ratios:
        return curve
    known = sorted(ratios)
    nearest = [min(known, key=lambda count: abs(count - place)) for place in range(1, len(curve) + 1)]
    return tuple(ms * ratios[count] for ms, count in zip(curve, nearest, strict=True))


def round_table(costs: RoundCosts) -> list[float]:
    """Costs of rounds with 0, 1, .. 16 drafts."""
    return [costs.round(window) for window in range(MAX_WINDOW + 1)]
