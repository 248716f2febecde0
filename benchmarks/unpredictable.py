"""What speculation costs on text that nothing can predict, as a share of plain decoding.

Two texts, both drawn at random, the same by speculation and plainly because draws belong to positions:

- `noise`: any token follows any other, after random tokens. Lookups find nothing; a draft model is right by chance.
- `shuffle`: twelve tokens in random order, after 300 of them. Every lookup finds something, which is wrong eleven
  times in twelve.

Every pair of runs, plain and with the bundle's own speculation in turn, gives a ratio of decoding times after the first
token; printed are the ratio of all time and the lowest and the middle one. 0.97 is what `fallback.max_overhead` allows.

    python benchmarks/unpredictable.py model.dsmodel [--tokens 64,128,400] [--texts 9]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

from dsc.runtime import load
from dsc.runtime.generate import SpeculativeModel

N_SHUFFLED = 12


class Uniform:
    """Gives some tokens the same chance and others none."""

    def __init__(self, allowed: NDArray[np.int64]) -> None:
        self._allowed = allowed

    def __call__(self, logits: NDArray[np.float32], tokens: Sequence[int], drafts: Sequence[int]) -> None:
        logits[:] = -np.inf
        logits[:, self._allowed] = 0.0


def text(kind: str, vocab_size: int, seed: int) -> tuple[list[int], Uniform]:
    """A prompt, and what may follow it."""
    rng = np.random.default_rng(seed)
    known = np.arange(vocab_size // 50, vocab_size // 2)  # neither special tokens nor padding
    if kind == "noise":
        return rng.choice(known, 64).tolist(), Uniform(known)
    few = rng.choice(known, N_SHUFFLED, replace=False)
    return rng.choice(few, 300).tolist(), Uniform(few)


def decoding_ms(model: SpeculativeModel, prompt: list[int], allowed: Uniform, n_tokens: int, speculation: str) -> float:
    """Milliseconds after the first token."""
    found = model.generate(
        prompt,
        n_tokens,
        sampling={"temperature": 1.0},
        seed=1,
        ignore_eos=True,
        speculation=speculation,
        processors=[allowed],
        reuse_cache=False,
    )
    return found.stats.total_ms - found.stats.first_token_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--tokens", default="64,128,400")
    parser.add_argument("--texts", type=int, default=9)
    options = parser.parse_args()
    model = load(options.bundle, verify="never")
    vocab_size = model.bundle.manifest.target.info.vocab_size
    print(f"{'text':8} {'tokens':>6} {'all':>6} {'lowest':>6} {'middle':>6}")
    for kind in ("noise", "shuffle"):
        for n_tokens in (int(number) for number in options.tokens.split(",")):
            spent: dict[str, list[float]] = {"off": [], "auto": []}
            for seed in range(options.texts + 1):
                prompt, allowed = text(kind, vocab_size, seed)
                for mode in ("off", "auto") if seed % 2 else ("auto", "off"):
                    spent[mode].append(decoding_ms(model, prompt, allowed, n_tokens, mode))
            plain, other = spent["off"][1:], spent["auto"][1:]  # the first pair warms up
            ratios = [a / b for a, b in zip(plain, other, strict=True)]
            print(f"{kind:8} {n_tokens:6} {sum(plain) / sum(other):6.3f} {min(ratios):6.3f} {median(ratios):6.3f}")


if __name__ == "__main__":
    main()
