"""`dsc bench`: speculation against plain decoding of the same bundle, in turn, on the same prompts."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from dsc.bundle_schema.errors import GenerationError, RequestError
from dsc.compiler.calibration import calibration_ids
from dsc.runtime.load import load
from dsc.runtime.request import check_prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsc.runtime.generate import SpeculativeModel
    from dsc.runtime.speculator import SpeculationRequest
    from dsc.runtime.stats import GenerationStats


def bench_bundle(
    path: Path, prompts: Path | None, max_new_tokens: int, rounds: int, threads: int | None, chat: bool = True
) -> dict[str, Any]:
    """Time every prompt with speculation off and on, `rounds` times in turn.

    Args:
        prompts: text file with one prompt a line; the compiler's calibration texts when None.
        chat: put each prompt into the bundle's chat template.

    Returns:
        `rows` for a table: prompt, tokens/s plain and speculative, their ratio, tokens a round, acceptance; plainly
        and with speculation time to first token and inter-token latency p50 and p99 in ms; and whether both outputs
        were identical.

    Raises:
        RequestError: no rounds, or prompts that cannot be read.
    """
    if rounds < 1:
        raise RequestError("--rounds", f"at least 1 is required, got {rounds}")
    model = load(path, threads=threads)
    encoded = _prompts(model, prompts, chat)
    _generate(model, encoded[0][1], 4, "auto", _Timed())
    rows = [_bench_prompt(model, name, ids, max_new_tokens, rounds) for name, ids in encoded]
    return {"threads": model.bundle.settings.threads, "rounds": rounds, "rows": rows}


def _prompts(model: SpeculativeModel, path: Path | None, chat: bool) -> list[tuple[str, list[int]]]:
    if path is None:
        vocab_size = model.bundle.manifest.target.info.vocab_size
        return [
            (f"calibration {index}", ids)
            for index, ids in enumerate(calibration_ids(model.bundle.codec, vocab_size, 6))
        ]
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(str(path), f"cannot read the prompts: {error}") from error
    if not lines:
        raise RequestError(str(path), "at least one prompt, one a line, is required, got none")
    return [(line[:24], _prompt_ids(model, line, chat)) for line in lines]


def _prompt_ids(model: SpeculativeModel, line: str, chat: bool) -> list[int]:
    ids = model.encode([{"role": "user", "content": line}] if chat else line)
    try:
        check_prompt(ids, model.bundle.manifest.target.info.vocab_size, model.max_length)
    except GenerationError as error:
        raise RequestError(f"prompt {line[:24]!r}", error.what, error.hint) from None
    return ids


def _bench_prompt(
    model: SpeculativeModel, name: str, ids: Sequence[int], max_new_tokens: int, rounds: int
) -> list[object]:
    plain, fast = _Timed(), _Timed()
    stats: GenerationStats | None = None
    same = True
    for _ in range(rounds):
        plain_ids, _ = _generate(model, ids, max_new_tokens, "off", plain)
        fast_ids, stats = _generate(model, ids, max_new_tokens, "auto", fast)
        same &= plain_ids == fast_ids
    assert stats is not None
    ratio = median(f / p for f, p in zip(fast.rates, plain.rates, strict=True)) if all(plain.rates) else 0.0
    return [
        name,
        median(plain.rates),
        median(fast.rates),
        ratio,
        stats.tokens_per_round,
        stats.acceptance_rate,
        *plain.latencies(),
        *fast.latencies(),
        "yes" if same else "NO",
    ]


@dataclass
class _Timed:
    """Runs of one setting: tokens/s, milliseconds to the first token, and between tokens."""

    rates: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def latencies(self) -> tuple[float, float, float]:
        """Mean to the first token; median and 99th percentile between tokens."""
        ordered = sorted(self.gaps)
        return mean(self.first_ms), _percentile(ordered, 0.5), _percentile(ordered, 0.99)


def _generate(
    model: SpeculativeModel, ids: Sequence[int], max_new_tokens: int, speculation: SpeculationRequest, timed: _Timed
) -> tuple[tuple[int, ...], GenerationStats]:
    """Ids and statistics; tokens of one round arrive together, and share the wait for them."""
    stream = model.stream(ids, max_new_tokens=max_new_tokens, speculation=speculation, ignore_eos=True)
    gaps: list[float] = []
    before = time.perf_counter()
    for chunk in stream:
        now = time.perf_counter()
        gaps += [(now - before) * 1e3 / max(1, len(chunk.ids))] * len(chunk.ids)
        before = now
    result = stream.finish()
    timed.rates.append(result.stats.tokens_per_second)
    timed.first_ms.append(result.stats.first_token_ms)
    timed.gaps += gaps[1:]
    return result.ids, result.stats


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
