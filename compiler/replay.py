"""Decodes a recorded token stream again by the runtime's own scheduling, without the models.

Lookups are computed again and are exact. A draft model's drafts are known where they were judged in the recording;
elsewhere they are right as often as the recording's were, drawn by position so that every policy meets the same luck.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dsc.bundle_schema.dflash_config import DflashConfig, ProposerKind
from dsc.compiler.trace_reader import TracedRequest, recorded_acceptance
from dsc.runtime.acceptance import RoundCosts
from dsc.runtime.continuation_cache import ContinuationCache, ContinuationProposer
from dsc.runtime.draft_reading import DraftReading
from dsc.runtime.proposers import LATE, NgramProposer, Proposer, RowWatcher, model_prior
from dsc.runtime.schedule_config import LiveConfig
from dsc.runtime.schedule_costs import LiveCosts
from dsc.runtime.schedule_lane import SHORT_LAG
from dsc.runtime.signals import SignalMeter, Signals
from dsc.runtime.speculator import Draft, SpeculationOptions, Speculator

_WRONG = -1  # a draft that is no token
_LATE_HOLDS = 0.7  # of right drafts, after a late start; SmolLM2-135M's own weights in four bits, five kinds of prompts


class RecordedDraft(DraftReading):
    """A draft model's drafts, right or wrong as they were in the recording.

    Args:
        kind: of the draft.
        stream: the whole recorded sequence.
        known: position and whether the draft had started late -> whether the draft of it was right.
        rate: share of right drafts where nothing is known.
        seed: of the draws there.
        reads: it reads the text itself, and does not continue what the target has read.
    """

    sizes_blocks = False
    watch: RowWatcher | None = None
    left: float | None = None

    def __init__(
        self,
        kind: ProposerKind,
        stream: Sequence[int],
        known: Mapping[tuple[int, bool], bool],
        rate: float,
        prior: float,
        seed: int,
        reads: bool = True,
    ) -> None:
        self.kind = kind
        self._stream = stream
        self._right = dict(known)
        self._rate = rate
        self._prior = prior
        self._seed = seed
        self.reads = reads
        self.longest = 2**30
        self._read = 0

    def look(self, tokens: Sequence[int]) -> str | None:
        """A model always has a proposal."""
        return self.kind_from(self.start)

    def silence(self, tokens: Sequence[int]) -> str:
        """Never asked."""
        return ""

    def room(self, tokens: Sequence[int]) -> int:
        """Up to the end of what was recorded."""
        return max(len(self._stream) - len(tokens), 1)

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """The recorded tokens up to the first wrong draft."""
        self.note_drafts(tokens, count)
        start = len(tokens)
        drafts = [_WRONG] * count
        for index in range(min(count, len(self._stream) - start)):
            if not self._is_right(start + index, self.start > 0):
                break
            drafts[index] = self._stream[start + index]
        self._read = start - self.start + count - 1
        return drafts

    def _is_right(self, position: int, late: bool) -> bool:
        """As recorded; a late start keeps a share of what is right, or would be, with all of the text."""
        if (position, late) not in self._right:
            luck = random.Random((self._seed * 2 + late) * 2**32 + position).random()
            right = self._is_right(position, False) and luck < _LATE_HOLDS if late else luck < self._rate
            self._right[position, late] = right
        return self._right[position, late]

    @property
    def n_read(self) -> int:
        """As many as its cache would hold."""
        return self._read if self.reads else len(self._stream)

    def forget(self, n_kept: int) -> None:
        """Drop what would have been read after them."""
        self._read = min(self._read, n_kept)

    def kind_from(self, start: int) -> str:
        """Late or not."""
        return LATE if start else self.kind

    def prior(self, kind: str) -> tuple[float, float]:
        """As the runtime expects of this kind."""
        return model_prior((self._prior, self._prior), kind)


class RecordedMeter(SignalMeter):
    """Signals of the models as they were recorded at or before a place; the others are computed again."""

    def __init__(self, config: DflashConfig, request: TracedRequest) -> None:
        super().__init__(config, len(request.request.prompt_ids))
        lines = [line for line in request.rounds if line.signals]
        self._places = [line.n_tokens for line in lines]
        self._signals = [line.signals or {} for line in lines]

    def read(self, n_tokens: int) -> Signals:
        """The signals for a sequence of `n_tokens`."""
        own = super().read(n_tokens)
        index = bisect_right(self._places, n_tokens) - 1
        if index < 0:
            return own
        seen = self._signals[index]
        return Signals(
            seen.get("slope"),
            seen.get("entropy"),
            seen.get("entropy_ratio"),
            seen.get("gap"),
            own.plnp,
            own.kv_hit_rate,
        )


@dataclass
class ReplayCounts:
    """What one policy did; `ms` is its time and `plain_ms` that of plain decoding, prompts not counted."""

    ms: float = 0.0
    plain_ms: float = 0.0
    tokens: int = 0
    rounds: int = 0
    proposed: int = 0
    evaluated: int = 0
    accepted: int = 0
    windows: Counter[int] = field(default_factory=Counter)
    proposers: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def count(self, draft: Draft, proposed: int, accepted: int, ms: float) -> None:
        """Book one round."""
        self.ms += ms
        self.rounds += 1
        self.proposed += proposed
        self.evaluated += min(accepted + 1, proposed)
        self.accepted += accepted
        self.windows[proposed] += 1
        if proposed:
            self.proposers[draft.proposer] += 1
        else:
            self.reasons[draft.reason or "off"] += 1


@dataclass(frozen=True)
class ReplaySetup:
    """How a policy is replayed.

    Attributes:
        config: the schedule.
        options: of every request; None decodes plainly.
        kinds: who may draft, the preferred one first.
        decide: costs by which it is decided, of a proposer after so many tokens.
        spend: those that are counted, of a draft that started late or did not; of plain rounds where the proposer is
            empty.
        rates: proposer -> share of right drafts and what the runtime expects of it.
        reading_ms: what a draft model takes to read one token of a long text; 0 leaves it to `decide`.
        host_ms: what a round takes beyond the costs that are counted.
        reads: a draft model reads the text itself, and does not continue what the target has read.
    """

    config: DflashConfig
    options: SpeculationOptions | None
    kinds: tuple[ProposerKind, ...]
    decide: Callable[[ProposerKind, int], LiveCosts]
    spend: Callable[[str, int, bool], RoundCosts]
    rates: Mapping[ProposerKind, tuple[float, float]]
    reading_ms: float = 0.0
    host_ms: float = 0.0
    reads: bool = True


def replay(setup: ReplaySetup, requests: Sequence[TracedRequest]) -> ReplayCounts:
    """Decode every request in turn, as one engine would."""
    counts = ReplayCounts()
    cache = ContinuationCache(setup.config.cache)
    for index, request in enumerate(requests):
        _replay_one(setup, request, index, cache, counts)
        cache.remember(request.tokens, len(request.request.prompt_ids))
    return counts


def _replay_one(
    setup: ReplaySetup, request: TracedRequest, seed: int, cache: ContinuationCache, counts: ReplayCounts
) -> None:
    stream, n_prompt = request.tokens, len(request.request.prompt_ids)
    speculator = _speculator(setup, request, seed, cache)
    stops = frozenset(request.request.stop_ids)
    middle = (n_prompt + len(stream)) // 2
    spend = {(kind, late): setup.spend(kind, middle, late) for kind in ("", *setup.kinds) for late in (False, True)}
    step_ms = spend["", False].step_ms
    length = n_prompt + 1  # the prompt's own forward gives the first token
    if speculator is not None:
        speculator.settle(0, 0)
        speculator.rewind(length - 1)
    counts.tokens += len(stream) - length
    counts.plain_ms += (len(stream) - length) * (step_ms + setup.host_ms)
    while length < len(stream):
        draft = Draft()
        lag_ms = 0.0
        if speculator is not None:
            room = request.request.max_tokens - length - 1
            draft = speculator.propose(stream[:length], room)
            lag_ms = speculator.catch_up_steps * step_ms
            if setup.reading_ms and draft.lag > SHORT_LAG:
                lag_ms = draft.lag * setup.reading_ms
        ids = _cut(draft.ids, stops)
        accepted = _matching(ids, stream[length:])
        costs = spend[draft.proposer if ids else "", draft.start > 0]
        round_ms = costs.round(len(ids)) * costs.step_ms + setup.host_ms
        counts.count(draft, len(ids), accepted, round_ms + lag_ms)
        length += accepted + 1
        if speculator is not None:
            speculator.settle(len(ids), accepted)
            speculator.rewind(length - 1)


def _speculator(setup: ReplaySetup, request: TracedRequest, seed: int, cache: ContinuationCache) -> Speculator | None:
    if setup.options is None or not setup.kinds:
        return None
    n_prompt = len(request.request.prompt_ids)
    proposers: list[tuple[Proposer, LiveCosts]] = []
    for kind in setup.kinds:
        if kind == "ngram":
            row = setup.config.proposers.get("ngram")
            proposer: Proposer = NgramProposer(row.min_match, row.max_match) if row else NgramProposer()
        elif kind == "cache":
            proposer = ContinuationProposer(cache, n_prompt)
        else:
            rate, prior = setup.rates[kind]
            known = recorded_acceptance(request, kind)
            proposer = RecordedDraft(kind, request.tokens, known, rate, prior, seed, setup.reads)
        proposers.append((proposer, setup.decide(kind, n_prompt)))
    meter = RecordedMeter(setup.config, request)
    return Speculator(proposers, setup.options, LiveConfig(setup.config), n_prompt, meter=meter, traced=True)


def _cut(ids: Sequence[int], stops: frozenset[int]) -> Sequence[int]:
    """Nothing is drafted past a stop token."""
    first = next((index for index, token in enumerate(ids) if token in stops), None)
    return ids if first is None else ids[: first + 1]


def _matching(drafts: Sequence[int], stream: Sequence[int]) -> int:
    for index, draft in enumerate(drafts):
        if index >= len(stream) or draft != stream[index]:
            return index
    return len(drafts)
