"""What rounds cost on this machine: target forwards of every size, and the draft's steps and reading.

Windows are chosen by ratios, so everything is measured against the plain step just before it: a machine that is slow
for a while is slow for both. Medians over several passes drop what hits one call. After a long text only some sizes are
measured: what it adds to a forward, the attention, grows evenly with the rows.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, cycle, islice
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from dsc.bundle_schema.dflash_config import MAX_WINDOW, CostCurve
from dsc.runtime.costs import device_fingerprint

if TYPE_CHECKING:
    from dsc.bundle_schema.dflash_config import ProposerKind
    from dsc.runtime.generate import SpeculativeModel

PASSES = 9
LEAST_PASSES = 3
SECONDS = 15.0  # after which no pass begins that is not among the least
SIZES = range(1, MAX_WINDOW + 1)
LONG_SIZES = (1, 2, 4, 8, MAX_WINDOW)
LONG_CONTEXT = 1024
PIECE = 256  # tokens of a long text, its last ones, whose reading by the draft is timed; fewer with rings
HOST_MS = 0.2  # of a round, outside the graphs


def measure_costs(model: SpeculativeModel, prompts: Sequence[Sequence[int]]) -> tuple[CostCurve, ...]:
    """Medians in ms after the longest prompt and, where that fits, after a long text; leaves the caches filled."""
    bundle = model.bundle
    limits = [model.max_length, *([bundle.draft.max_length] if bundle.draft is not None else [])]
    room = max(1, min(limits) - MAX_WINDOW)
    short = min(len(max(prompts, key=len)), room)
    long = max(short, min(LONG_CONTEXT, room))
    text = list(islice(cycle(chain.from_iterable(prompts)), long))
    costs = _curve(model, _measured(model, text[:short], SIZES), short)
    if long < 2 * short:
        return (costs,)
    return costs, _curve(model, _measured(model, text, LONG_SIZES), long, costs)


def _measured(model: SpeculativeModel, text: Sequence[int], sizes: Sequence[int]) -> _Times:
    """Times after `text`, of forwards of these sizes."""
    times = _Times(model, text, sizes)
    times.one_pass()  # makes bindings and wakes threads
    times.forget()
    start = time.perf_counter()
    for n_passes in range(PASSES):
        if n_passes < LEAST_PASSES or time.perf_counter() - start < SECONDS:
            times.one_pass()
    return times


def _curve(model: SpeculativeModel, times: _Times, context: int, full: CostCurve | None = None) -> CostCurve:
    """The costs after `context` tokens; sizes that were not measured as in `full`, scaled as their neighbours are."""
    verify_ms = tuple(times.ms(rows) for rows in times.sizes)
    if full is not None:
        scale = [ms / full.verify_ms[rows - 1] for ms, rows in zip(verify_ms, times.sizes, strict=True)]
        verify_ms = tuple((np.interp(SIZES, times.sizes, scale) * full.verify_ms).tolist())
    draft_ms: dict[ProposerKind, tuple[float, ...]] = {}
    read_ms: dict[ProposerKind, float] = {}
    if model.bundle.draft is not None:
        kind = model.bundle.manifest.draft.kind
        step = times.ms("draft")
        draft_ms[kind] = tuple(step * window for window in SIZES)
        if model.bundle.draft.reads:
            read_ms[kind] = times.ms("read")
    return CostCurve(
        device=device_fingerprint(model.bundle.settings),
        context=context,
        verify_ms=verify_ms,
        draft_ms=draft_ms,
        read_ms=read_ms,
        host_ms=HOST_MS,
    )


class _Times:
    """What rounds are made of, measured in passes against plain steps.

    Args:
        text: what the target's and the draft's caches hold.
        sizes: of the target's forwards, in rows.
    """

    def __init__(self, model: SpeculativeModel, text: Sequence[int], sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self._target = model.bundle.target
        self._draft = model.bundle.draft
        self._token = text[0]
        self._plain: list[float] = []  # ms
        self._ratios: defaultdict[int | str, list[float]] = defaultdict(list)
        self._target.rewind(0)
        self._target.read(text)
        readable = _for_draft(model, text)
        self._piece: Sequence[int] = ()
        if self._draft is not None:
            self._draft.rewind(0)
            self._draft.read(readable)
            least = self._draft.zone.least  # to which rings can be wound back; a draft step after a piece writes a row
            self._piece = readable[max(len(readable) - PIECE, least + 1 if least else 0) :]

    def one_pass(self) -> None:
        """A draft with a cache of its own reads a piece; then plain steps, draft steps and forwards take turns."""
        draft = self._draft
        if draft is not None and draft.reads:
            plain = self._plain_step()
            draft.rewind(draft.length - len(self._piece))
            self._ratios["read"].append(_ms(partial(draft.read, self._piece)) / len(self._piece) / plain)
        for rows in self.sizes:
            plain = self._plain_step()
            if draft is not None:
                # The target's weights have just gone through the processor's cache, as they have in a round.
                self._ratios["draft"].append(_ms(partial(draft.forward, [0], 1)) / plain)
            ms = self._forward(rows)  # of one row too: what comes before a plain step is then the same for all
            self._ratios[rows].append(ms / plain if rows > 1 else 1.0)

    def _plain_step(self) -> float:
        self._plain.append(self._forward(1))
        return self._plain[-1]

    def _forward(self, rows: int) -> float:
        return _ms(partial(self._target.forward, [self._token] * rows, rows))

    def forget(self) -> None:
        """Drop what was measured."""
        self._plain.clear()
        self._ratios.clear()

    def ms(self, name: int | str) -> float:
        """Of forwards over so many rows, ``draft`` steps, or of a token that the draft has to ``read``."""
        return median(self._plain) * median(self._ratios[name])


def _ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _for_draft(model: SpeculativeModel, ids: Sequence[int]) -> list[int]:
    """`ids` as far as the draft model can read them: its vocabulary may be smaller."""
    entry = model.bundle.manifest.draft.model
    return [] if entry is None else [min(token, entry.info.vocab_size - 1) for token in ids]
