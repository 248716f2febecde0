"""Many sequences in one process: aggregate tokens/s by batch size, and what a joining prompt costs the others.

Every batch size runs in turn, in one process, so that a busy machine slows all of them; figures are medians of the
ratios of neighbouring runs. Decoding is plain (`--speculation auto` for the bundle's own), greedy, and counted from the
moment when all sequences decode.

The second part decodes three sequences; after a while a prompt of 1,000 tokens joins. The gaps between a sequence's
tokens are measured before and while the prompt is read. The third part compares three ways of giving the target the
rows of such a round: packed, padded to the longest, and one forward a sequence.

    python benchmarks/engine.py build/bench/bundles/int8.dsmodel --json engine.json

`--cpu-time` counts the process's own time with one thread instead of wall time: ratios hold on a busy machine, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np
from prompts import all_prompts

from dsc.bundle_schema.kv_layout import resized
from dsc.runtime import SpeculativeModel, load
from dsc.runtime.kv_arena import KvArena
from dsc.runtime.session import ForwardSession, Rows

Clock = Callable[[], float]

PROMPT_ROWS = 1000
WARM_ROUNDS = 40


def chat_ids(model: SpeculativeModel, count: int) -> list[list[int]]:
    texts = [prompt.text for prompt in all_prompts() if prompt.category == "chat"]
    return [model.encode([{"role": "user", "content": texts[i % len(texts)]}]) for i in range(count)]


def long_ids(model: SpeculativeModel) -> list[int]:
    text = "\n".join(prompt.text for prompt in all_prompts() if prompt.category == "document")
    return model.encode(text)[:PROMPT_ROWS]


def decode_speed(
    model: SpeculativeModel, prompts: list[list[int]], n_tokens: int, speculation: str, clock: Clock
) -> float:
    """Tokens/s of all sequences together, from the round after which all decode."""
    engine = model.engine(slots=len(prompts), background=False)
    options = {"max_new_tokens": n_tokens, "ignore_eos": True, "speculation": speculation}
    tickets = [engine.submit(ids, **options) for ids in prompts]
    while not all(ticket.stats.rounds for ticket in tickets):
        engine.step()
    done = sum(committed(ticket) for ticket in tickets)
    start = clock()
    while not any(ticket.done for ticket in tickets):
        engine.step()
    seconds = clock() - start
    speed = (sum(committed(ticket) for ticket in tickets) - done) / seconds
    engine.close()
    return speed


def committed(ticket: Any) -> int:
    stats = ticket.stats
    return int(stats.accepted + stats.correction + stats.bonus)


def compare_batches(
    model: SpeculativeModel, sizes: list[int], n_tokens: int, repeats: int, speculation: str, clock: Clock
) -> dict[str, Any]:
    prompts = chat_ids(model, max(sizes))
    decode_speed(model, prompts, 8, speculation, clock)
    runs = [[decode_speed(model, prompts[:n], n_tokens, speculation, clock) for n in sizes] for _ in range(repeats)]
    table = {}
    for place, size in enumerate(sizes):
        speeds, ratios = [run[place] for run in runs], [run[place] / run[0] for run in runs]
        table[size] = {"tokens_s": statistics.median(speeds), "ratio": statistics.median(ratios), "ratios": ratios}
        print(f"batch {size}: {table[size]['tokens_s']:7.1f} tokens/s, {table[size]['ratio']:.2f} x batch {sizes[0]}")
    return table


def join_gaps(model: SpeculativeModel, stretch: float, clock: Clock) -> dict[str, float]:
    """Milliseconds between a sequence's tokens, before and while a long prompt is read beside it."""
    engine = model.engine(slots=4, background=False, prefill_stretch=stretch)
    options = {"max_new_tokens": 900, "ignore_eos": True, "speculation": "off"}
    for ids in chat_ids(model, 3):
        engine.submit(ids, **options)

    def round_ms() -> float:
        start = clock()
        engine.step()
        return (clock() - start) * 1000

    for _ in range(WARM_ROUNDS):
        engine.step()
    before = [round_ms() for _ in range(WARM_ROUNDS)]
    joining = engine.submit(long_ids(model), **options)
    during = []
    while not joining.stats.rounds:
        during.append(round_ms())
    engine.close()
    every = before + during
    return {
        "p50_before": float(np.percentile(before, 50)),
        "p50": float(np.percentile(every, 50)),
        "p99": float(np.percentile(during, 99)),
        "rounds": len(during),
        "first_token_ms": sum(during),
    }


def compare_joins(model: SpeculativeModel, stretch: float, repeats: int, clock: Clock) -> dict[str, Any]:
    rows = [join_gaps(model, stretch, clock) for _ in range(repeats)]
    table = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    table["p99_to_p50_before"] = statistics.median(row["p99"] / row["p50_before"] for row in rows)
    table["p99_to_p50"] = statistics.median(row["p99"] / row["p50"] for row in rows)
    print(
        f"a {PROMPT_ROWS}-token prompt joins 3 sequences: gaps p50 {table['p50_before']:.1f} ms before it; while it is "
        f"read p99 {table['p99']:.1f} ms = {table['p99_to_p50_before']:.2f} x that p50 "
        f"({table['p99_to_p50']:.2f} x the p50 of all); read in {table['rounds']:.0f} rounds, "
        f"{table['first_token_ms']:.0f} ms"
    )
    return table


@dataclass(frozen=True)
class Pools:
    pools: dict[str, Any]


def compare_packing(model: SpeculativeModel, repeats: int, clock: Clock, piece: int = 32) -> dict[str, float]:
    """Milliseconds of the target for three decoding rows and a piece of a prompt, by the way they are given to it."""
    session, past = model.bundle.target.session, 64
    if not isinstance(session, ForwardSession) or not session.packs_rows:
        raise SystemExit("a bundle with packed rows is required; compile it again")
    plan = resized(model.bundle.arena.plan, model.max_length, 4)
    arena = KvArena(plan)
    shared = session.over(Pools(arena.pools("target")), 4, 4 * piece)
    alone = [session.over(Pools(arena.pools_of("target", slot)), 4, 4 * piece) for slot in range(4)]
    counts = (1, 1, 1, piece)
    packed = [Rows(slot, [7] * count, past, int(count == 1)) for slot, count in enumerate(counts)]
    padded = [Rows(slot, [7] * piece, past, 1) for slot in range(4)]
    ways: dict[str, Callable[[], object]] = {
        "packed": lambda: shared.forward_packed(packed),
        "padded": lambda: shared.forward_packed(padded),
        "apart": lambda: [one.forward([7] * count, past, 1) for one, count in zip(alone, counts, strict=True)],
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats * 4):
        for name, way in ways.items():
            start = clock()
            way()
            times[name].append((clock() - start) * 1000)
    table = {name: statistics.median(values) for name, values in times.items()}
    for name in ("padded", "apart"):
        ratios = [other / own for own, other in zip(times["packed"], times[name], strict=True)]
        table[f"{name}_to_packed"] = statistics.median(ratios)
    print(
        f"3 decoding rows and {piece} of a prompt: packed {table['packed']:.1f} ms, padded "
        f"{table['padded_to_packed']:.2f} x, one forward a sequence {table['apart_to_packed']:.2f} x"
    )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--sizes", default="1,2,4,8", help="batch sizes")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens a sequence")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stretch", type=float, default=2.0, help="the engine's prefill_stretch")
    parser.add_argument("--speculation", default="off", choices=["off", "auto"])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--cpu-time", action="store_true", help="this process's time on one thread: for a busy machine")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    clock: Clock = process_time if args.cpu_time else perf_counter
    model = load(args.bundle, threads=1 if args.cpu_time else args.threads, max_length=2048)
    sizes = [int(size) for size in args.sizes.split(",")]
    result = {
        "batches": compare_batches(model, sizes, args.tokens, args.repeats, args.speculation, clock),
        "join": compare_joins(model, args.stretch, args.repeats, clock),
        "packing": compare_packing(model, args.repeats, clock),
    }
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
