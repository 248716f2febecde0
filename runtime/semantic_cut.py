"""Where a generated text jumps to another topic or task: a change of direction of the final hidden state.

Forward graphs do not put the hidden state out. The logits are its image under the head, so a fixed sample of a row's
logits, less their mean, is a linear image of its direction; of 512 of them the cosines are those of the whole row but
for some hundredths (measured). Single tokens turn it everywhere; a topic shows in the mean of some tokens. Compared are
the means of the 16 rows before a place and after it. They have to differ, and to differ also without what the text had
in common before both: some texts turn all the time. The place of a jump is where the means differ most.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

SAMPLE = 512
SPAN = 16
"""Rows of each of the two means."""
HISTORY = 32
"""Rows before both that say what the text has in common."""
ALIKE = 0.75
"""Cosine of the two means, as they are, from which they are of one topic."""

Sample = NDArray[np.float32]
Direction = NDArray[np.float32]


class SemanticCut:
    """Watches the logits of one generated text.

    A jump can be seen 2 * `SPAN` tokens after its place, when no deeper one has followed at once. `SPAN` tokens or more
    are looked at together, which is cheaper than one by one: it is known up to `SPAN` - 1 tokens and a block later,
    which must be before a continuation of the old space may end (`continuation_cache.SEGMENT` tokens after the jump).

    Args:
        threshold: cosine of the two means, less what was common, below which there is a jump.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._picked: NDArray[np.intp] | None = None
        self._waiting: list[Sample] = []
        self._sums: deque[Direction] = deque(maxlen=2 * SPAN + 1)  # of all rows up to the newest, and before it
        self._start: Direction | None = None  # the sum where the present topic began
        self._n_rows = 0  # since then
        self._lowest: tuple[float, int] | None = None  # cosine, and rows since its place

    def sample(self, rows: NDArray[np.float32]) -> Sample:
        """What `see` needs of logits [n, V], as [n, SAMPLE]."""
        if self._picked is None:
            self._picked = np.linspace(0, rows.shape[1] - 1, min(SAMPLE, rows.shape[1])).astype(np.intp)
        sample: Sample = rows[:, self._picked]
        return sample

    def see(self, sample: Sample) -> list[int]:
        """Take in the sample [n, SAMPLE] of the rows that gave the next n tokens.

        Returns:
            For each jump that is known now, how many tokens before the newest its place lies; 0 is the newest's.
        """
        self._waiting.append(sample)
        if sum(map(len, self._waiting)) < SPAN:
            return []
        found = directions(np.concatenate(self._waiting))
        self._waiting.clear()
        backs = [(index, self._see(direction)) for index, direction in enumerate(found)]
        return [back + len(found) - 1 - index for index, back in backs if back is not None]

    def _see(self, direction: Direction) -> int | None:
        """One row; how many rows ago a jump took place, None when none is known now."""
        if self._start is None:
            self._start = np.zeros_like(direction)
            self._sums.append(self._start)
        self._sums.append(self._sums[-1] + direction)
        self._n_rows += 1
        if self._lowest is not None:
            self._lowest = (self._lowest[0], self._lowest[1] + 1)
        before = self._n_rows - 2 * SPAN
        if before < HISTORY:
            return None
        oldest, middle, newest = self._sums[0], self._sums[SPAN], self._sums[-1]
        one, other, common = (middle - oldest) / SPAN, (newest - middle) / SPAN, (oldest - self._start) / before
        cosine = _cosine(one, other)
        limit = ALIKE if self._lowest is None else self._lowest[0]
        if cosine < limit and _cosine(one - common, other - common) < self._threshold:
            self._lowest = (cosine, SPAN - 1)
        if self._lowest is None or self._lowest[1] < 2 * SPAN - 1:
            return None
        back = self._lowest[1]
        self._lowest, self._start, self._n_rows = None, oldest, 2 * SPAN
        return back


def directions(sample: Sample) -> Direction:
    """Of the hidden states behind sampled logits [n, SAMPLE]; what is banned or no number carries no weight."""
    known = np.isfinite(sample)
    finite = np.where(known, sample, 0)
    means = finite.sum(axis=1, keepdims=True) / np.maximum(known.sum(axis=1, keepdims=True), 1)
    found: Direction = np.where(known, finite - means, 0)
    return found


def _cosine(one: NDArray[np.floating[Any]], other: NDArray[np.floating[Any]]) -> float:
    size = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / size if size > 0 else 1.0
