"""What a scripted model of 13 tokens says after a prompt, and the ways of drafting for it."""

from __future__ import annotations

import numpy as np
from scripted_lm import greedy_reference

VOCAB = 13
RNG = np.random.default_rng(11)
TARGET = RNG.normal(size=(VOCAB, VOCAB)).astype(np.float32)
DRAFT = TARGET + 0.3 * RNG.normal(size=TARGET.shape).astype(np.float32)
PROMPT = [3, 1, 4]
PLAIN = greedy_reference(TARGET, PROMPT, 50)
SELF = {"proposer": "self", "window": 5, "fallback": False}
OPTIONS = ["off", "auto", SELF, {"proposer": "ngram", "window": 4, "fallback": False}]


def first_index(token: int) -> int:
    """Where a token occurs first in what the model says."""
    return PLAIN.index(token)
