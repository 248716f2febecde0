"""What the gate measures of a loaded bundle, one entry of its certificate a function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dsc.bundle_schema.certificate import (
    ChiSquareCheck,
    FiniteCheck,
    GreedyCheck,
    Mismatch,
    ParityCheck,
    RowsCheck,
)
from dsc.bundle_schema.dflash_config import MAX_WINDOW
from dsc.compiler.chi_square import chi_square
from dsc.runtime.sampling import SamplingParams, UniformDraws
from dsc.runtime.verify import verifier_for

if TYPE_CHECKING:
    from dsc.runtime.generate import SpeculativeModel
    from dsc.runtime.speculator import SpeculationRequest
    from dsc.runtime.stats import GenerationStats

SAMPLING_SETTINGS = ((0.7, 0.9), (1.3, 1.0))


@dataclass(frozen=True)
class Reference:
    """Logits [S, V] of the framework's own model on `ids` [S]."""

    framework: str
    ids: tuple[int, ...]
    logits: NDArray[np.float32]


def check_greedy(
    model: SpeculativeModel, prompts: Sequence[Sequence[int]], n_tokens: int, window: int
) -> list[GreedyCheck]:
    """Every proposer of the bundle, at its default window and at the widest."""
    plain = [_greedy(model, ids, n_tokens, "off") for ids in prompts]
    checks = []
    for proposer in model.proposers:
        for width in sorted({window, 2 * window if window <= MAX_WINDOW // 2 else MAX_WINDOW}):
            settings = {"proposer": proposer, "window": width, "fallback": False}
            mismatches = []
            stats: list[GenerationStats] = []
            for index, ids in enumerate(prompts):
                found = _greedy(model, ids, n_tokens, settings, stats)
                if found != plain[index]:
                    mismatches.append(_mismatch(model, index, ids, plain[index], found))
            checks.append(
                GreedyCheck(
                    proposer=proposer,
                    window=width,
                    n_prompts=len(prompts),
                    n_tokens=sum(len(ids) for ids in plain),
                    n_judged=sum(run.evaluated for run in stats),
                    n_held=sum(run.accepted for run in stats),
                    mismatches=tuple(mismatches),
                )
            )
    return checks


def _greedy(
    model: SpeculativeModel,
    ids: Sequence[int],
    n_tokens: int,
    speculation: SpeculationRequest,
    stats: list[GenerationStats] | None = None,
) -> list[int]:
    """The output; what it took is added to `stats`."""
    result = model.generate(ids, max_new_tokens=n_tokens, ignore_eos=True, speculation=speculation)
    if stats is not None:
        stats.append(result.stats)
    return list(result.ids)


def _mismatch(
    model: SpeculativeModel, index: int, prompt: Sequence[int], plain: Sequence[int], found: Sequence[int]
) -> Mismatch:
    """Where two outputs part, and how close the plain run's logits were there."""
    position = next(i for i, (a, b) in enumerate(zip(plain, found, strict=True)) if a != b)
    logits = _logits(model, [*prompt, *plain[:position]], 1)[-1]
    return Mismatch(
        prompt=index,
        position=position,
        plain=plain[position],
        speculative=found[position],
        logit_gap=float(abs(logits[plain[position]] - logits[found[position]])),
    )


def _logits(model: SpeculativeModel, ids: Sequence[int], n_rows: int) -> NDArray[np.float32]:
    """Logits [n_rows, V] of the last rows of `ids`, verified together after the rest was read alone."""
    target = model.bundle.target
    target.rewind(0)
    if len(ids) > n_rows:
        target.read(ids[:-n_rows])
    return target.forward(ids[-n_rows:], n_rows).copy()


def check_rows(model: SpeculativeModel, prompts: Sequence[Sequence[int]]) -> tuple[RowsCheck, FiniteCheck]:
    """Logits of blocks of rows against the same rows one at a time, over the cached prompt."""
    equal, largest, n_rows, n_changes, n_ties, n_values, n_bad = True, 0.0, 0, 0, 0, 0, 0
    widest = MAX_WINDOW + 1
    for ids in prompts:
        width = min(widest, len(ids))
        together = _logits(model, ids, width)
        alone = _rows_alone(model, ids, width)
        equal &= np.array_equal(together, alone, equal_nan=True)
        both = np.isfinite(together) & np.isfinite(alone)
        largest = max(largest, float(np.abs(together[both] - alone[both]).max(initial=0.0)))
        n_rows += width
        for row_together, row_alone in zip(together, alone, strict=True):
            if row_together.argmax() != row_alone.argmax():
                n_changes += 1
                best = np.partition(row_alone, -2)[-2:]
                n_ties += int(best[0] == best[1])
        n_values += together.size
        n_bad += int(together.size - np.isfinite(together).sum())
    rows = RowsCheck(
        max_rows=widest,
        n_rows=n_rows,
        bit_equal=equal,
        max_difference=largest,
        n_argmax_changes=n_changes,
        n_ties=n_ties,
    )
    return rows, FiniteCheck(n_values=n_values, n_not_finite=n_bad)


def _rows_alone(model: SpeculativeModel, ids: Sequence[int], width: int) -> NDArray[np.float32]:
    target = model.bundle.target
    target.rewind(0)
    if len(ids) > width:
        target.read(ids[:-width])
    rows = []
    for token in ids[-width:]:
        rows.append(target.forward([token], 1)[0].copy())
        target.commit(1, 1)
    return np.stack(rows)


def check_sampling(model: SpeculativeModel, prompts: Sequence[Sequence[int]], n_draws: int) -> list[ChiSquareCheck]:
    """The first token that speculation emits against the target's distribution of it.

    Where the target is least sure there is most to compare. The draft is its second choice, so that it is
    accepted sometimes and rejected sometimes.
    """
    if not n_draws:
        return []
    firsts = [_logits(model, ids, 1)[0] for ids in prompts]
    index = int(np.argmin([filtered_softmax(row, 1.0, 1.0).max() for row in firsts]))
    prompt, draft = prompts[index], int(np.argsort(firsts[index])[-2])
    logits = _logits(model, [*prompt, draft], 2)
    checks = []
    for temperature, top_p in SAMPLING_SETTINGS:
        params = SamplingParams(temperature=temperature, top_p=top_p, seed=1)
        verifier = verifier_for(params)
        draws = UniformDraws(params.seed or 0)
        counts = np.zeros(logits.shape[1])
        for trial in range(n_draws):
            verdict = verifier.verify(logits.copy(), [draft], draws.at(trial, 2))
            counts[draft if verdict.accepted else verdict.next_token] += 1
        statistic, freedom, p_value = chi_square(counts, filtered_softmax(logits[0], temperature, top_p))
        checks.append(
            ChiSquareCheck(
                proposer="point mass",
                temperature=temperature,
                top_p=top_p,
                n_draws=n_draws,
                statistic=statistic,
                degrees_of_freedom=freedom,
                p_value=p_value,
            )
        )
    return checks


def filtered_softmax(logits: NDArray[np.float32], temperature: float, top_p: float) -> NDArray[np.float64]:
    """The distribution that plain sampling has: temperature, then the smallest set of mass `top_p`."""
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0.0
    filtered: NDArray[np.float64] = p / p.sum()
    return filtered


def check_parity(model: SpeculativeModel, reference: Reference) -> ParityCheck:
    """Logits of the reference's positions that the bundle has room for, in blocks of verified rows."""
    target = model.bundle.target
    target.rewind(0)
    ids = reference.ids[: model.max_length]
    found = []
    for start in range(0, len(ids), MAX_WINDOW):
        block = ids[start : start + MAX_WINDOW]
        found.append(target.forward(block, len(block)).copy())
        target.commit(len(block), len(block))
    logits = np.concatenate(found)
    wanted = reference.logits[: len(ids)]
    return ParityCheck(
        framework=reference.framework,
        n_positions=len(ids),
        max_difference=float(np.abs(logits - wanted).max()),
        logit_range=float(wanted.max() - wanted.min()),
        n_argmax_equal=int((logits.argmax(1) == wanted.argmax(1)).sum()),
        correlation=_correlation(logits, wanted),
    )


def _correlation(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """Of logits [S, V], each row's mean taken off; 0 where one of them says nothing."""
    a, b = (rows.astype(np.float64) - rows.mean(axis=1, keepdims=True) for rows in (found, wanted))
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float(np.clip((a * b).sum() / scale, -1, 1)) if scale > 0 else 0.0
