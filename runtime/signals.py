"""What the scheduler sees of a round: how sure the models were, and how the drafts fared.

Everything is read from logits that are on the host already, and only for policies that ask for it: three maxima of one
row a round, and of each draft row. Entries that are minus infinity (padding, banned tokens) carry no weight, and rounds
without a row do not enter the averages.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from math import exp, inf, log

import numpy as np
from numpy.typing import NDArray

from dsc.bundle_schema.dflash_config import DflashConfig

TOP = 3
_FLOOR = -50.0  # log-probability of a top entry that a row does not have


@dataclass(frozen=True)
class Signals:
    """State of one sequence before a round; a signal that is not known yet is None.

    Attributes:
        slope: mean absolute change, from one draft position to the next, of the draft's log-probabilities at ranks 1 to
            3 (renormalised over the three).
        entropy: of the renormalised top 3 of the newest row, in nats.
        entropy_ratio: `entropy` over the mean of the last rows.
        gap: (p1 - p2) / p1 of the newest row.
        plnp: generated tokens / prompt length.
        kv_hit_rate: share of the last KV rows written that were kept.
    """

    slope: float | None = None
    entropy: float | None = None
    entropy_ratio: float | None = None
    gap: float | None = None
    plnp: float = 0.0
    kv_hit_rate: float = 1.0


def top_log_probs(row: NDArray[np.float32]) -> tuple[float, ...]:
    """Log-probabilities of a row's three largest logits among themselves, falling.

    Args:
        row: logits [V]; unchanged on return.
    """
    places, values = [], []
    for _ in range(min(TOP, row.shape[0])):
        place = int(row.argmax())
        places.append(place)
        values.append(float(row[place]))
        row[place] = -inf
    for place, value in zip(places, values, strict=True):
        row[place] = value
    total = values[0] + log(sum(exp(value - values[0]) for value in values)) if values[0] > -inf else 0.0
    return tuple(max(value - total, _FLOOR) for value in values)


def entropy_of(log_probs: tuple[float, ...]) -> float:
    """Entropy in nats."""
    return -sum(exp(value) * value for value in log_probs)


def gap_of(log_probs: tuple[float, ...]) -> float:
    """(p1 - p2) / p1; 1 when there is no second token."""
    return 1.0 - exp(log_probs[1] - log_probs[0]) if len(log_probs) > 1 else 1.0


class SignalMeter:
    """Gathers the signals of one sequence.

    Args:
        config: spans of the averages.
        n_prompt: tokens of the sequence that are its prompt.
    """

    def __init__(self, config: DflashConfig, n_prompt: int) -> None:
        self._n_prompt = n_prompt
        self._entropies: deque[float] = deque(maxlen=config.selector.entropy_span)
        self._rows: deque[tuple[int, int]] = deque()  # written, kept
        self._hit_span = config.rules.hit_rate_span
        self._written = 0
        self._kept = 0
        self._draft_rows: list[tuple[float, ...]] = []
        self._slope: float | None = None
        self._newest: tuple[float, ...] | None = None

    def see_draft(self, row: NDArray[np.float32]) -> None:
        """One row [V] of the draft's logits."""
        self._draft_rows.append(top_log_probs(row))

    def see_target(self, row: NDArray[np.float32]) -> None:
        """The row [V] of the target's logits that gave the newest token."""
        self._newest = top_log_probs(row)
        self._entropies.append(entropy_of(self._newest))

    def settle(self, proposed: int, accepted: int) -> None:
        """A round with `proposed` drafts has ended."""
        self._rows.append((proposed + 1, accepted + 1))
        self._written += proposed + 1
        self._kept += accepted + 1
        while self._written - self._rows[0][0] >= self._hit_span:
            written, kept = self._rows.popleft()
            self._written -= written
            self._kept -= kept
        self._slope = _slope(self._draft_rows) if len(self._draft_rows) > 1 else self._slope
        self._draft_rows = self._draft_rows[-1:]

    def read(self, n_tokens: int) -> Signals:
        """The signals for a sequence of `n_tokens`."""
        entropy = self._entropies[-1] if self._entropies else None
        mean = sum(self._entropies) / len(self._entropies) if self._entropies else 0.0
        return Signals(
            slope=self._slope,
            entropy=entropy,
            entropy_ratio=entropy / mean if entropy is not None and mean > 0 else None,
            gap=gap_of(self._newest) if self._newest is not None else None,
            plnp=(n_tokens - self._n_prompt) / self._n_prompt,
            kv_hit_rate=self._kept / self._written if self._written else 1.0,
        )


def _slope(rows: list[tuple[float, ...]]) -> float:
    changes = [abs(new - old) for before, after in pairwise(rows) for old, new in zip(before, after, strict=True)]
    return sum(changes) / len(changes)
