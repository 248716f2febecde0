"""Time to the first token of a prompt that was read before, against reading it: what saved KV rows are worth.

Every round times, for the same prompt: reading it (`reuse_cache=False`); its rows put back from the saved text after a
text that is new in each round (`restored`: saving that text is part of the time); and the same prompt at once again
(`live`). Prints medians, the median of the rounds' ratios, and whether all outputs were equal.

    python benchmarks/prefix_reuse.py model.dsmodel [--tokens 500] [--rounds 7]
"""

from __future__ import annotations

import argparse
from statistics import median

from prompts import by_category

from dsc.runtime import load
from dsc.runtime.generate import SpeculativeModel

NEW_TOKENS = 8
WAYS = ("read", "restored", "live")


def documents(model: SpeculativeModel, n_tokens: int) -> list[list[int]]:
    """Two prompts of exactly so many tokens."""
    texts = "\n".join(prompt.text for prompt in by_category()["document"])
    ids = model.encode(texts)
    while len(ids) < 2 * n_tokens:
        ids += ids
    return [ids[:n_tokens], ids[n_tokens : 2 * n_tokens]]


def first_token(model: SpeculativeModel, ids: list[int], way: str) -> tuple[float, tuple[int, ...]]:
    """Milliseconds to the first token, and the output."""
    result = model.generate(ids, NEW_TOKENS, speculation="off", ignore_eos=True, reuse_cache=way != "read")
    stats = result.stats
    expected = {"read": (0, 0), "restored": (len(ids) - 1, len(ids) - 1), "live": (0, len(ids) - 1)}[way]
    if (stats.restored_tokens, stats.cached_tokens) != expected:
        raise SystemExit(
            f"{way}: restored, cached {expected} expected, got {stats.restored_tokens, stats.cached_tokens}"
        )
    return stats.first_token_ms, result.ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    model = load(options.bundle)
    one, other = documents(model, options.tokens)
    for ids in (one, other):  # the first is saved when the second displaces it
        model.generate(ids, NEW_TOKENS, speculation="off", reuse_cache=True)
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    same = True
    for number in range(options.rounds):
        read_ms, plain = first_token(model, one, "read")
        model.generate([number, *other[1:]], NEW_TOKENS, speculation="off", reuse_cache=True)
        times["read"].append(read_ms)
        for way in ("restored", "live"):
            ms, ids = first_token(model, one, way)
            times[way].append(ms)
            same &= ids == plain
    print(f"{options.tokens} tokens, {options.rounds} rounds, {model.bundle.settings.kernels} kernels")
    for way in WAYS:
        ratio = median(read / ms for read, ms in zip(times["read"], times[way], strict=True))
        print(f"{way:10}{median(times[way]):10.1f} ms{ratio:8.1f} x")
    print("outputs equal:", "yes" if same else "NO")


if __name__ == "__main__":
    main()
