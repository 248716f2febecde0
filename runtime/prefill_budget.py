"""How much of waiting prompts a round reads beside the sequences that decode."""

from __future__ import annotations

from collections.abc import Sequence

_LEAST_ROWS = 4
_FIRST_ROWS = 16  # before anything was measured
_WEIGHT = 0.2  # of the newest measurement


class PrefillBudget:
    """Rows of prompts that a round may read so that it takes at most `stretch` times as long as without them.

    The time is measured as the engine runs, so the budget follows the machine, the batch and the contexts. Reading in
    other pieces changes no output.

    Args:
        stretch: how much longer a round may take because of prompts, at least 1.
        most: rows of one forward.
    """

    def __init__(self, stretch: float, most: int) -> None:
        self._stretch = stretch
        self._most = most
        self._plain_ms: float | None = None
        self._row_ms: float | None = None

    def rows(self, decoding: int) -> int:
        """The budget of a round in which `decoding` sequences wait for their next token."""
        if decoding == 0:
            return self._most
        if self._plain_ms is None or not self._row_ms:
            return min(_FIRST_ROWS, self._most)
        rows = int((self._stretch - 1) * self._plain_ms / self._row_ms)
        return min(max(rows, _LEAST_ROWS), self._most)

    def observe(self, decoding: int, prompt_rows: int, ms: float) -> None:
        """A round took `ms` milliseconds."""
        if decoding and not prompt_rows:
            self._plain_ms = _follow(self._plain_ms, ms)
        elif decoding and self._plain_ms is not None:
            self._row_ms = _follow(self._row_ms, max(ms - self._plain_ms, 0.0) / prompt_rows)


def _follow(known: float | None, newest: float) -> float:
    return newest if known is None else known + _WEIGHT * (newest - known)


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
