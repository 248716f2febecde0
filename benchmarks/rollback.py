"""What a draft keeps after a rejection, and what that saves: `adaptive_rollback` on and off, in turn.

A draft model keeps what it has read of the drafts that held; without adaptive rollback the whole block is forgotten and
what held is read again. Prompt lookup keeps its index; from scratch it would index the whole text again. Drafts and
output are the same both ways, which is checked. Prints a Markdown table; the first drafts of an answer, which read the
prompt, do not count.

    python benchmarks/rollback.py bundle.dsmodel [--prompts 2] [--tokens 96] [--rounds 3]
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

sys.path.append(str(Path(__file__).parent))

from prompts import by_category
from report import markdown_table

from dsc.runtime import load
from dsc.runtime.generate import SpeculativeModel
from dsc.runtime.proposers import NgramProposer

WINDOWS = (2, 4, 8)
TEMPERATURES = (0.0, 1.0)  # sampled tokens are harder to guess: more rejections


@dataclass
class Work:
    """Drafting of all prompts, one way.

    Attributes:
        rows: tokens that the draft read, `steps` of them one by one.
        ms: time of proposing, one entry for each round of the benchmark.
    """

    rounds: int = 0
    rejections: int = 0
    steps: int = 0
    rows: int = 0
    tokens: int = 0
    ms: list[float] = field(default_factory=list)
    blocks: list[tuple[int, ...]] = field(default_factory=list)


def drafted_rounds(
    model: SpeculativeModel, ids: Sequence[int], n_tokens: int, window: int, temperature: float, adaptive: bool
) -> list[dict[str, Any]]:
    """A traced answer's rounds but for the first drafts."""
    model.update_config({"adaptive_rollback": adaptive})
    trace = io.StringIO()
    model.generate(
        ids,
        n_tokens,
        sampling={"temperature": temperature},
        seed=1,
        ignore_eos=True,
        speculation={"proposer": model.bundle.manifest.draft.kind, "window": window, "fallback": False},
        trace=trace,
        reuse_cache=True,
    )
    lines = [json.loads(line) for line in trace.getvalue().splitlines()]
    return [line for line in lines if line["event"] == "round" and line["draft_ids"]][1:]


def draft_work(
    model: SpeculativeModel, prompts: Sequence[list[int]], options: argparse.Namespace, window: int, temperature: float
) -> dict[bool, Work]:
    """With and without adaptive rollback, in turn."""
    found = {True: Work(), False: Work()}
    for number in range(options.rounds):
        ms = {True: 0.0, False: 0.0}
        for place, ids in enumerate(prompts):
            model.generate(ids, 1, speculation="off", reuse_cache=True)  # both read the end of the prompt only
            order = (True, False) if (place + number) % 2 else (False, True)
            for adaptive in order:
                rounds = drafted_rounds(model, ids, options.tokens, window, temperature, adaptive)
                ms[adaptive] += sum(line["ms"]["propose"] for line in rounds)
                if number == 0:
                    count(found[adaptive], rounds)
        for adaptive, spent in ms.items():
            found[adaptive].ms.append(spent)
    if found[True].blocks != found[False].blocks:
        raise SystemExit(f"window {window}, temperature {temperature}: the drafts depend on what is kept")
    return found


def count(work: Work, rounds: Sequence[dict[str, Any]]) -> None:
    for line in rounds:
        n_drafts = len(line["draft_ids"])
        work.rounds += 1
        work.rejections += line["accepted"] < n_drafts
        work.steps += n_drafts
        work.rows += n_drafts + line["lag"]
        work.tokens += len(line["new_ids"])
        work.blocks.append((*line["draft_ids"], *line["new_ids"]))


def draft_row(temperature: float, window: int, found: dict[bool, Work]) -> tuple[object, ...]:
    kept, again = found[True], found[False]
    ratio = median(other / one for one, other in zip(kept.ms, again.ms, strict=True))
    return (
        "greedy" if temperature == 0 else f"temperature {temperature:g}",
        window,
        f"{kept.rejections} of {kept.rounds}",
        kept.steps,
        f"{kept.rows} / {again.rows}",
        f"{median(kept.ms) / kept.tokens:.2f} / {median(again.ms) / again.tokens:.2f}",
        f"{ratio:.3f}",
    )


def lookup_us(model: SpeculativeModel, prompts: Sequence[list[int]], n_tokens: int, scratch: bool) -> float:
    """Median microseconds of looking up after each token of plain answers.

    Args:
        scratch: as if every token were a rejection that nothing survives.
    """
    times = []
    for ids in prompts:
        tokens = [*ids, *model.generate(ids, n_tokens, ignore_eos=True, speculation="off").ids]
        proposer = NgramProposer()
        for length in range(len(ids), len(tokens)):
            seen = tokens[:length]
            start = perf_counter()
            proposer.rewind(0 if scratch else length - 1)
            proposer.look(seen)
            times.append((perf_counter() - start) * 1e6)
    return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", help="with a draft model")
    parser.add_argument("--prompts", type=int, default=2, help="of each category")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model = load(options.bundle, verify="never")
    if model.bundle.draft is None:
        raise SystemExit(f"{options.bundle}: a bundle with a draft model is required, it offers {model.proposers}")
    texts = [prompt.text for group in by_category(options.prompts).values() for prompt in group]
    encoded = [model.encode([{"role": "user", "content": text}]) for text in texts]
    prompts = [ids for ids in encoded if len(ids) + options.tokens <= model.max_length]
    rows = [
        draft_row(temperature, window, draft_work(model, prompts, options, window, temperature))
        for temperature in TEMPERATURES
        for window in WINDOWS
    ]
    header = ("output", "window", "rejections", "steps", "rows kept / again", "ms a token kept / again", "again / kept")
    print(f"draft `{model.bundle.manifest.draft.kind}`, {len(prompts)} prompts of {options.tokens} tokens\n")
    print(markdown_table(header, rows))
    kept, scratch = (lookup_us(model, prompts, options.tokens, scratch) for scratch in (False, True))
    print(f"prompt lookup: {kept:.0f} us with the index kept, {scratch:.0f} us from scratch")


if __name__ == "__main__":
    main()
