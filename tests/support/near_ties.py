"""Outputs of one model in different arithmetic may part only where the choice was a near tie.

Float16 rounds more than float32, and a GPU's product of one row rounds differently from one of several. That can turn a
choice only between tokens that are almost equally good, or at a draw that lies on their border; after it the texts are
different texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dsc.kernels.speculative_verify_rules import target_distribution
from dsc.runtime.generate import SpeculativeModel
from dsc.runtime.sampling import UniformDraws

CLOSE = 0.02
"""Of the spread of a row of logits, or of the range of a draw: what float16 may shift."""


def assert_same_but_for_near_ties(
    model: SpeculativeModel, prompt: Any, outputs: Sequence[Sequence[int]], sampling: Mapping[str, Any]
) -> None:
    """Compare two outputs; `model` gives the logits where they part, and `sampling` has a seed unless it is greedy."""
    first, second = outputs
    assert len(first) == len(second)
    at = next((i for i, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1]), None)
    if at is None:
        return
    tokens, pair = [*model.encode(prompt), *first[:at]], (first[at], second[at])
    distance = distance_from_tie(logits_after(model, tokens), pair, sampling, len(tokens))
    assert distance <= CLOSE, f"token {at}: {pair[0]} or {pair[1]}, {distance:.3f} from a tie"


def logits_after(model: SpeculativeModel, tokens: Sequence[int]) -> np.ndarray:
    """The row of logits [V] that follows `tokens`."""
    rows: list[np.ndarray] = []
    watch = [lambda logits, seen, drafts: rows.append(logits[0].copy())]
    model.generate(list(tokens), 1, speculation="off", processors=watch, ignore_eos=True)
    return rows[0]


def distance_from_tie(row: np.ndarray, pair: tuple[int, int], sampling: Mapping[str, Any], position: int) -> float:
    """How far a choice between two tokens was from undecided, as a share of what `CLOSE` is a share of.

    Args:
        row: logits [V].
        position: of the token in its sequence, which its draw belongs to.
    """
    if not sampling:
        return float(abs(row[pair[0]] - row[pair[1]]) / np.ptp(row))
    settings = {name: value for name, value in sampling.items() if name != "seed"}
    ends = np.concatenate([[0.0], np.cumsum(target_distribution(row, **settings))])
    draw = UniformDraws(sampling["seed"]).at(position, 1)[0]
    return float(max(0.0, *(max(ends[token] - draw, draw - ends[token + 1]) for token in pair)))
