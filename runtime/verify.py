"""The tail of a round: from the target's logits to how many drafts hold and which token comes next.

Every row's token is chosen as plain decoding would choose it: the most likely one, or one drawn with the draws of its
own position. A draft holds if it is what was chosen. For a proposal that puts all its weight on one token this accepts
exactly as often as rejection sampling (Leviathan et al. 2022: with probability p(draft)), and it makes the output a
function of prompt and seed alone: the same with speculation and without, whatever was drafted. Rows are looked at one
by one, so a rejected block costs one choice and not K + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dsc.bundle_schema.errors import GenerationError
from dsc.runtime.decode import Verdict
from dsc.runtime.sampling import SamplingParams

_FIRST_CUT, _LAST_CUT = 1e-2, 1e-10  # weights relative to the most likely token's


def require_finite(logit: np.float32) -> float:
    """The best logit of a row.

    Raises:
        GenerationError: it is no finite number: every token is banned, or the model or a processor gave infinities.
    """
    if not np.isfinite(logit):
        raise GenerationError("logits", f"a token with a finite logit is required, got {logit} at the best")
    return float(logit)


class RowChooser(Protocol):
    """Chooses the token of one row."""

    def choose(self, row: NDArray[np.float32], draw: float) -> int:
        """The token for logits `row` [V] and a uniform `draw`."""


class GreedyChooser:
    """The most likely token; the first of equals, as ONNX's ArgMax."""

    def choose(self, row: NDArray[np.float32], draw: float) -> int:
        """`draw` is not used."""
        return int(row.argmax())


class SampledChooser:
    """Draws from the filtered distribution: temperature, then top-k, top-p, min-p, each on what the one before left."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params

    def choose(self, row: NDArray[np.float32], draw: float) -> int:
        """Inverse of the cumulative distribution over token ids in rising order.

        Raises:
            GenerationError: the row allows no token, or holds an infinity or what is no number.
        """
        highest = require_finite(row.max())  # the maximum is NaN when any logit is
        kept = self._candidates(row, highest)  # ids in rising order, or None for all
        weights = self._weights(row if kept is None else row[kept], highest)
        cumulative = np.cumsum(weights, dtype=np.float64)
        index = int(np.searchsorted(cumulative, draw * cumulative[-1], side="right"))
        index = min(index, len(weights) - 1)
        return index if kept is None else int(kept[index])

    def _weights(self, logits: NDArray[np.float32], highest: float) -> NDArray[np.float32]:
        """Probabilities up to a factor; the most likely token's is 1."""
        weights: NDArray[np.float32] = np.exp((logits - np.float32(highest)) / np.float32(self._params.temperature))
        return weights

    def _candidates(self, row: NDArray[np.float32], highest: float) -> NDArray[np.intp] | None:
        """Ids that the filters keep, in rising order; None keeps all."""
        params = self._params
        kept: NDArray[np.intp] | None = None
        if 0 < params.top_k < len(row):
            kept = np.argpartition(row, -params.top_k)[-params.top_k :]
        if params.top_p < 1:
            kept = self._nucleus(row, kept, highest)
        if params.min_p > 0:
            ids = np.arange(len(row)) if kept is None else kept
            weights = self._weights(row[ids], highest)
            kept = ids[weights >= params.min_p]
        return None if kept is None else np.sort(kept)

    def _nucleus(self, row: NDArray[np.float32], kept: NDArray[np.intp] | None, highest: float) -> NDArray[np.intp]:
        """The most likely tokens up to the one that brings their mass to `top_p`; at least one."""
        ids = np.arange(len(row)) if kept is None else kept
        weights = self._weights(row[ids], highest)
        wanted = self._params.top_p * weights.sum(dtype=np.float64)
        cut = _FIRST_CUT
        while True:
            # Most of the mass lies on few tokens: sort those, and more only when they are not enough.
            head = np.flatnonzero(weights >= cut)
            order = head[np.lexsort((ids[head], -weights[head]))]
            mass = np.cumsum(weights[order], dtype=np.float64)
            if mass[-1] >= wanted or cut == 0:
                return ids[order[: int(np.searchsorted(mass, wanted)) + 1]]
            cut = cut * _FIRST_CUT if cut > _LAST_CUT else 0.0


class MatchVerifier:
    """Accepts drafts as long as they are what the target chooses itself."""

    def __init__(self, chooser: RowChooser) -> None:
        self._chooser = chooser

    def verify(self, logits: NDArray[np.float32], drafts: Sequence[int], draws: NDArray[np.float64]) -> Verdict:
        """See `dsc.runtime.decode.Verifier`.

        Raises:
            GenerationError: a row allows no token, or its logits are not numbers.
        """
        accepted = 0
        while True:
            row = logits[accepted]
            token = self._chooser.choose(row, float(draws[accepted]))
            require_finite(row[token])
            if accepted == len(drafts) or token != drafts[accepted]:
                return Verdict(accepted, token)
            accepted += 1


def verifier_for(sampling: SamplingParams) -> MatchVerifier:
    """The verifier that a request's sampling needs."""
    return MatchVerifier(GreedyChooser() if sampling.greedy else SampledChooser(sampling))
