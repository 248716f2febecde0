"""The texts on which the gate measures a bundle."""

from __future__ import annotations

from importlib.resources import files

import numpy as np

from dsc.runtime.text import TextCodec


def calibration_ids(codec: TextCodec | None, vocab_size: int, n_prompts: int) -> list[list[int]]:
    """Token ids of `n_prompts` calibration prompts, each at least one token.

    A bundle without a tokenizer is measured on random ids with repetitions, always the same ones.
    """
    if codec is None:
        return [_random_ids(seed, vocab_size) for seed in range(n_prompts)]
    texts = files("dsc.compiler").joinpath("calibration.txt").read_text(encoding="utf-8").split("\n---\n")
    prompts = [codec.encode(texts[index % len(texts)].rstrip("\n")) for index in range(n_prompts)]
    # Past the last text they start again, each time with fewer tokens, so that no two prompts are equal.
    return [ids[: max(1, len(ids) - index // len(texts))] for index, ids in enumerate(prompts)]


def _random_ids(seed: int, vocab_size: int) -> list[int]:
    ids = np.random.default_rng(seed).integers(0, vocab_size, 12).tolist()
    return [*ids, *ids[:6]]
