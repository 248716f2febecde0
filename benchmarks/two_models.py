"""Two models in one process: does one that has just run slow the other, and what do both at once deliver?

Every round times the first model after itself, the first right after the second, the second after itself, and both at
once, each on the same prompt and decoding plainly. Prints medians, and medians of the rounds' ratios:

- `turns`: the first model's time after itself over that after the other. Less than 1 means that threads of a model
  which waits take the processors from one that works.
- `at once`: the time of both one after the other over that of both at once; 1 is a fair share each.

    python benchmarks/two_models.py first.dsmodel second.dsmodel [--tokens 64] [--rounds 9]
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from time import perf_counter

from prompts import by_category

from dsc.runtime import load
from dsc.runtime.generate import SpeculativeModel


class Contestant:
    """One model and its prompt.

    Attributes:
        outputs: every output so far, of which there should be one.
    """

    def __init__(self, bundle: str, n_tokens: int) -> None:
        self._model: SpeculativeModel = load(bundle, verify="never")
        self._ids = self._model.encode([{"role": "user", "content": by_category()["chat"][0].text}])
        self._n_tokens = n_tokens
        self.outputs: set[tuple[int, ...]] = set()

    def seconds(self) -> float:
        start = perf_counter()
        result = self._model.generate(self._ids, self._n_tokens, ignore_eos=True, speculation="off", reuse_cache=False)
        self.outputs.add(result.ids)
        return perf_counter() - start


def seconds_at_once(*contestants: Contestant) -> float:
    with ThreadPoolExecutor(len(contestants)) as pool:
        start = perf_counter()
        list(pool.map(Contestant.seconds, contestants))
        return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first")
    parser.add_argument("second")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    first, second = (Contestant(bundle, options.tokens) for bundle in (options.first, options.second))
    times: dict[str, list[float]] = {"first": [], "first after second": [], "second": [], "both at once": []}
    for _ in range(options.rounds):
        first.seconds()
        times["first"].append(first.seconds())
        second.seconds()
        times["first after second"].append(first.seconds())
        second.seconds()
        times["second"].append(second.seconds())
        times["both at once"].append(seconds_at_once(first, second))
    for name, spent in times.items():
        print(f"{name:20}{median(spent) * 1e3:10.1f} ms")
    alone, after, other, both = times.values()
    print(f"turns    {median(a / b for a, b in zip(alone, after, strict=True)):.2f}")
    print(f"at once  {median((a + o) / b for a, o, b in zip(alone, other, both, strict=True)):.2f}")
    print("outputs equal:", "yes" if len(first.outputs) == len(second.outputs) == 1 else "NO")


if __name__ == "__main__":
    main()
