"""What speculation costs on text that nothing can predict, as a share of plain decoding.

Two texts, both drawn at random, the same by speculation and plainly because draws belong to positions:

- `noise`: any token follows any other, after random tokens. Lookups find nothing; a draft model is right by chance.
- `shuffle`: twelve tokens in random order, after 300 of them. Every lookup finds something, which is wrong eleven
  times in twelve.

The bundle is loaded twice. Both decode the same text, one plainly and one with the bundle's own speculation, 16 tokens
in turn, so that a machine that is slow for a second is slow for both; then they change roles. Printed are plain
decoding's time over that of speculation, first tokens not counted: of all texts, with the standard error of a text's
mean, and the lowest and the middle text. 0.97 is what `fallback.max_overhead` allows.

    python benchmarks/unpredictable.py model.dsmodel [--tokens 64,128,400] [--texts 24] [--modes off,auto]

`--modes off,off` shows what the measurement itself is worth: it should print 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median, stdev
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from dsc.runtime import load
from dsc.runtime.generate import SpeculativeModel

N_SHUFFLED = 12
IN_TURN = 16


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


class Timed:
    """One generation as it runs, and the seconds it took after its first token."""

    def __init__(self, model: SpeculativeModel, prompt: list[int], allowed: Uniform, n_tokens: int, mode: str) -> None:
        self._chunks = model.stream(
            prompt,
            n_tokens,
            sampling={"temperature": 1.0},
            seed=1,
            ignore_eos=True,
            speculation="off" if mode == "off" else "auto",
            processors=[allowed],
            reuse_cache=False,
        )
        self._n_tokens = n_tokens
        self.seconds = 0.0
        self.n_decoded = len(next(self._chunks).ids)

    def run_to(self, n_tokens: int) -> None:
        """Decode until there are `n_tokens`, or all."""
        started = perf_counter()
        while self.n_decoded < min(n_tokens, self._n_tokens):
            self.n_decoded += len(next(self._chunks).ids)
        self.seconds += perf_counter() - started

    def close(self) -> None:
        """Let the model go."""
        self._chunks.close()


def side_by_side(
    models: Sequence[SpeculativeModel], modes: Sequence[str], prompt: list[int], allowed: Uniform, n_tokens: int
) -> list[float]:
    """Seconds of each model, in its mode."""
    runs = [Timed(model, prompt, allowed, n_tokens, mode) for model, mode in zip(models, modes, strict=True)]
    for turn, goal in enumerate(range(IN_TURN, n_tokens + IN_TURN, IN_TURN)):
        for run in runs if turn % 2 else reversed(runs):
            run.run_to(goal)
    for run in runs:
        run.close()
    return [run.seconds for run in runs]


def measure(models: Sequence[SpeculativeModel], modes: Sequence[str], kind: str, n_tokens: int, n_texts: int) -> str:
    """A line of the table."""
    vocab_size = models[0].bundle.manifest.target.info.vocab_size
    spent: list[tuple[float, float]] = []
    for seed in range(n_texts + 1):
        prompt, allowed = text(kind, vocab_size, seed)
        one, other = side_by_side(models, modes, prompt, allowed, n_tokens)
        other_too, one_too = side_by_side(models, modes[::-1], prompt, allowed, n_tokens)
        spent.append((one + one_too, other + other_too))
    del spent[0]  # warms up
    ratios = [one / other for one, other in spent]
    total = sum(one for one, _ in spent) / sum(other for _, other in spent)
    error = stdev(ratios) / len(ratios) ** 0.5
    return f"{kind:8} {n_tokens:6} {total:6.3f} {error:6.3f} {min(ratios):6.3f} {median(ratios):6.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--tokens", default="64,128,400")
    parser.add_argument("--texts", type=int, default=24, help="2 or more")
    parser.add_argument("--modes", default="off,auto")
    options = parser.parse_args()
    models = [load(options.bundle, verify="never") for _ in range(2)]
    print(f"{'text':8} {'tokens':>6} {'all':>6} {'error':>6} {'lowest':>6} {'middle':>6}")
    for kind in ("noise", "shuffle"):
        for n_tokens in (int(number) for number in options.tokens.split(",")):
            print(measure(models, options.modes.split(","), kind, n_tokens, options.texts), flush=True)


if __name__ == "__main__":
    main()
