"""What rounds cost on this machine: target forwards of every size, and the draft's steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from dsc.bundle_schema.dflash_config import MAX_WINDOW, CostCurve
from dsc.runtime.costs import device_fingerprint

if TYPE_CHECKING:
    from dsc.bundle_schema.dflash_config import ProposerKind
    from dsc.runtime.generate import SpeculativeModel

REPEATS = 5
HOST_MS = 0.2  # of a round, outside the graphs


def measure_costs(model: SpeculativeModel, prompts: Sequence[Sequence[int]]) -> CostCurve:
    """Medians in ms over the longest prompt in the cache; leaves the caches filled."""
    ids = max(prompts, key=len)
    target = model.bundle.target
    target.rewind(0)
    target.read(ids)
    context = target.length
    draft_ms: dict[ProposerKind, tuple[float, ...]] = {}
    if model.bundle.draft is not None:
        draft_ms[model.bundle.manifest.draft.kind] = _draft_ms(model, ids)
    return CostCurve(
        device=device_fingerprint(model.bundle.settings),
        context=max(1, context),
        verify_ms=_verify_ms(model, ids[0]),
        draft_ms=draft_ms,
        host_ms=HOST_MS,
    )


def _verify_ms(model: SpeculativeModel, token: int) -> tuple[float, ...]:
    """Forwards over 1 .. MAX_WINDOW rows, sizes in turn so that a busy moment does not hit one of them alone."""
    target = model.bundle.target
    times: list[list[float]] = [[] for _ in range(MAX_WINDOW)]
    for _ in range(REPEATS):
        for rows in range(1, MAX_WINDOW + 1):
            times[rows - 1].append(_timed(partial(target.forward, [token] * rows, rows)))
    return tuple(median(column) for column in times)


def _draft_ms(model: SpeculativeModel, ids: Sequence[int]) -> tuple[float, ...]:
    """Drafting 1 .. MAX_WINDOW tokens, one step a token."""
    draft = model.bundle.draft
    assert draft is not None
    draft.rewind(0)
    draft.read(_for_draft(model, ids))
    step = median(_timed(partial(draft.forward, [0], 1)) for _ in range(REPEATS * 4))
    draft.rewind(0)
    return tuple(step * window for window in range(1, MAX_WINDOW + 1))


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _for_draft(model: SpeculativeModel, ids: Sequence[int]) -> list[int]:
    """`ids` as far as the draft model can read them: its context and its vocabulary may be smaller."""
    draft, entry = model.bundle.draft, model.bundle.manifest.draft.model
    assert draft is not None
    assert entry is not None
    return [min(token, entry.info.vocab_size - 1) for token in ids[: draft.max_length - 1]]
