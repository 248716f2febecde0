"""What a scripted model of 13 tokens says after a prompt, how it is spelled, and the ways of drafting for it."""

from __future__ import annotations

import numpy as np
from scripted_lm import greedy_reference
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB = 13
LETTERS = "abcdefghijklm"
RNG = np.random.default_rng(11)
TARGET = RNG.normal(size=(VOCAB, VOCAB)).astype(np.float32)
DRAFT = TARGET + 0.3 * RNG.normal(size=TARGET.shape).astype(np.float32)
PROMPT = [3, 1, 4]
PLAIN = greedy_reference(TARGET, PROMPT, 50)
SELF = {"proposer": "self", "window": 5, "fallback": False}
NGRAM = {"proposer": "ngram", "window": 4, "fallback": False}
OPTIONS = ["off", "auto", SELF, NGRAM]


def first_index(token: int) -> int:
    """Where a token occurs first in what the model says."""
    return PLAIN.index(token)


def letters() -> dict[str, bytes]:
    """The files of a tokenizer whose token i is the i-th letter."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return {"tokenizer.json": tokenizer.to_str().encode()}


def spelled(ids: list[int] | tuple[int, ...]) -> str:
    """The text of ids."""
    return "".join(LETTERS[token] for token in ids)
