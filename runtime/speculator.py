"""Decides, before each round, who drafts and how many tokens, and learns from how it went.

Decisions depend on the tokens and on costs measured beforehand: the same bundle, prompt and seed take the same
decisions on every run. Only where the configuration says so are the costs corrected by a clock, and what a draft model
may still lose is carried from one request to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dsc.bundle_schema.dflash_config import MAX_WINDOW, DflashConfig
from dsc.bundle_schema.dflash_config import Proposer as ProposerRow
from dsc.bundle_schema.errors import RequestError
from dsc.runtime.arguments import number
from dsc.runtime.continuation_cache import ContinuationProposer, anchor
from dsc.runtime.proposers import Proposer
from dsc.runtime.rests import Rests
from dsc.runtime.schedule_config import LiveConfig
from dsc.runtime.schedule_costs import LiveCosts
from dsc.runtime.schedule_lane import COOL_DOWN, Lane
from dsc.runtime.schedule_policy import UNPAID, Offer, make_policy
from dsc.runtime.schedule_rules import History, wants_signals
from dsc.runtime.semantic_cut import Sample, SemanticCut
from dsc.runtime.signals import SignalMeter, Signals

NO_SIGNALS = Signals()
_NO_HISTORY = History()
_REFRESH_ROUNDS, _PLAIN_SAMPLE = 8, 4
_RATE_PRIOR = 8.0  # tokens that count as decoded plainly before a request's own rate is known


class SpeculationOptions(BaseModel):
    """How one call speculates; what is None is taken from the bundle's configuration.

    Attributes:
        proposer: ``ngram``, ``cache``, or the bundle's draft (``model``, ``self``). Without it the policy chooses among
            all that the bundle offers; the `fixed` policy takes the bundle's draft.
        window: drafts a round, as far as `fallback` lets it stake them. Without it the configured policy decides;
            the `fixed` policy sizes lookups by what they are expected to give for their measured cost.
        max_window: cap of a window that is not given.
        fallback: decode plainly while speculation does not pay; without it every round drafts what it can.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    proposer: str | None = None
    window: Annotated[int, Field(ge=0, le=MAX_WINDOW)] | None = None
    max_window: Annotated[int, Field(ge=1, le=MAX_WINDOW)] | None = None
    fallback: Annotated[bool, Field(strict=True)] | None = None

    _numbers = field_validator("window", "max_window", mode="before")(number)

    @model_validator(mode="after")
    def _one_window(self) -> Self:
        if self.window is not None and self.max_window is not None:
            raise ValueError("window or max_window is required, the cap of one that is not given")
        return self


SpeculationRequest = Literal["auto", "off"] | Mapping[str, Any] | SpeculationOptions


def speculation_options(request: SpeculationRequest) -> SpeculationOptions | None:
    """The options that a caller's `request` means, None when it means plain decoding.

    Raises:
        RequestError: an unknown word, or an unknown or out-of-range field, named.
    """
    if isinstance(request, SpeculationOptions):
        return request
    if isinstance(request, str) and request in ("auto", "off"):
        return None if request == "off" else SpeculationOptions()
    if not isinstance(request, Mapping):
        raise RequestError("speculation", f"'auto', 'off' or options are required, got {request!r}")
    try:
        return SpeculationOptions.model_validate(request)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(("speculation", *map(str, first["loc"])))
        raise RequestError(where, f"{first['msg'].removeprefix('Value error, ')}, got {first['input']!r}") from error


class Draft(NamedTuple):
    """The drafts of one round, or why there are none.

    Attributes:
        proposer: who drafted; empty when nobody did.
        window: drafts that the policy asked for; the account, or a stop token among them, may have cut the block.
        signals: what the policy saw; None when it did not look.
        lag: tokens that the proposer had to read before it could draft.
        start: tokens at the beginning of the sequence that it has left out.
        history: how the rounds before went.
    """

    ids: tuple[int, ...] = ()
    reason: str = ""
    proposer: str = ""
    window: int = 0
    signals: Signals | None = None
    lag: int = 0
    start: int = 0
    history: History = _NO_HISTORY


class Intent(NamedTuple):
    """What a sequence would draft in the next round if it had the round to itself.

    Attributes:
        offer: the proposer's; None when nothing would be drafted, for the `reason`.
        joint: the policy weighs drafts by expected tokens a second, so sequences of one round are weighed together.
    """

    offer: Offer | None = None
    window: int = 0
    reason: str = ""
    signals: Signals | None = None
    joint: bool = False


class RoundTimes(NamedTuple):
    """Milliseconds of one round: proposing, and the target's forward over `rows` rows with the verdict on them."""

    rows: int
    propose_ms: float
    target_ms: float


class Speculator:
    """One request's speculation: who drafts how much in each round, by the configuration in force.

    Attributes:
        cuts: where the text began another topic, as far as the continuation cache makes use of it.

    Args:
        proposers: what may draft, the preferred one first, each with the costs of its rounds.
        options: the request's.
        live: the configuration; what changes in it holds from the next round on.
        n_prompt: tokens of the sequence that are its prompt.
        refresh: correct the costs by measured times. Decisions then depend on a clock.
        meter: gathers the signals.
        traced: gather them although the policy does not ask for them.
    """

    def __init__(
        self,
        proposers: Sequence[tuple[Proposer, LiveCosts]],
        options: SpeculationOptions,
        live: LiveConfig,
        n_prompt: int,
        refresh: bool = False,
        meter: SignalMeter | None = None,
        traced: bool = False,
    ) -> None:
        config = live.current
        fallback = config.fallback.enabled if options.fallback is None else options.fallback
        share = 1 / len(proposers) if fallback else None
        self._options = options
        self._live = live
        self._refresh = refresh
        self._lanes = [
            Lane(index, proposer, costs, config, self._cap(config, proposer), share)
            for index, (proposer, costs) in enumerate(proposers)
        ]
        self._meter = meter or SignalMeter(config, n_prompt)
        self._traced = traced
        self._history = _NO_HISTORY
        self._plain = self._followed = 0  # rounds without drafts, and rounds by which costs were corrected
        self._n_prompt = n_prompt
        self._tokens = self._steps = _RATE_PRIOR  # committed, and what they cost, by the measured costs
        self._used: Lane | None = None
        self._rests = Rests(fallback)
        threshold = config.cache.semantic_cut
        self._continuations = [p for p, _ in proposers if isinstance(p, ContinuationProposer)]
        self._cutter = SemanticCut(threshold) if self._continuations and threshold > -1 else None
        self.cuts: list[int] = []
        self._configure()

    def _configure(self) -> None:
        config = self._live.current
        self._version = self._live.version
        self._rules = config.rules
        self._policy = make_policy(config, self._options.window)
        self.reads_signals = self._traced or (self._options.window is None and wants_signals(config))
        for lane in self._lanes:
            lane.configure(config, self._cap(config, lane.proposer))
            lane.proposer.watch = self._meter.see_draft if self.reads_signals else None

    def _cap(self, config: DflashConfig, proposer: Proposer) -> int:
        """Most drafts of a round: of the request, of the policy, and of the proposer's row unless the request is
        explicit.
        """
        if self._options.window is not None:
            return self._options.window
        if config.policy == "fixed" and not proposer.sizes_blocks:
            cap = min(config.windows.default, self._options.max_window or MAX_WINDOW)
        else:
            cap = self._options.max_window or config.windows.max
        return min(cap, config.proposers.get(proposer.kind, ProposerRow()).max_window)

    def propose(self, tokens: Sequence[int], room: int) -> Draft:
        """Drafts to follow `tokens`, at most `room` of them."""
        intent = self.consider(tokens, room)
        return self.draft(tokens, intent, intent.window)

    def consider(self, tokens: Sequence[int], room: int) -> Intent:
        """What to draft after `tokens`, decided by what is known before anything is drafted."""
        self._used = None
        rests = self._rests
        if rests.deep and not self.reads_signals:
            return Intent(reason=rests.reason)
        self._live.poll()
        if self._version != self._live.version:
            rests.wake()
            self._configure()
        signals = self._meter.read(len(tokens)) if self.reads_signals else None
        if rests.resting:
            return Intent(reason=rests.reason, signals=signals)
        self._book_rests()
        generated, rate = len(tokens) - self._n_prompt, self._tokens / self._steps
        found = [lane.offer(tokens, room, generated, max(rate, 1.0)) for lane in self._lanes]
        offers = [offer for offer in found if isinstance(offer, Offer)]
        if not offers:
            rests.nothing_offered(str(found[0]), min([lane.waiting for lane in self._lanes]))
            return Intent(reason=str(found[0]), signals=signals)
        choice = self._policy.choose(offers, signals or NO_SIGNALS, self._history)
        rests.offered(choice.reason if choice.reason == UNPAID else "")
        if choice.offer is None or choice.window == 0:
            return Intent(reason=choice.reason, signals=signals)
        joint = self._options.window is None and self._live.current.policy in ("batched", "calibrated")
        return Intent(choice.offer, choice.window, "", signals, joint)

    def _book_rests(self) -> None:
        rounds, self._rests.unbooked = self._rests.unbooked, 0
        if rounds:
            self._tokens += rounds
            self._steps += rounds
            for lane in self._lanes:
                lane.rest(rounds)

    def draft(self, tokens: Sequence[int], intent: Intent, window: int) -> Draft:
        """The drafts of an intent, at most `window` of them."""
        if intent.offer is None or window == 0:
            return Draft(reason=intent.reason or "not admitted", signals=intent.signals, history=self._history)
        lane = self._lanes[intent.offer.lane]
        ids = lane.draft(tokens, window)
        if not ids:
            return Draft(reason=COOL_DOWN, signals=intent.signals, history=self._history)
        self._used = lane
        kind = lane.proposer.kind
        return Draft(tuple(ids), "", kind, window, intent.signals, lane.unread, lane.start, self._history)

    @property
    def catch_up_steps(self) -> float:
        """What the drafting model of this round had to read first, in plain decoding steps."""
        return self._used.catch_up if self._used is not None else 0.0

    def see_target(self, row: NDArray[np.float32]) -> None:
        """The row [V] of the target's logits that gave the newest token; only if `reads_signals`."""
        self._meter.see_target(row)

    def sample(self, logits: NDArray[np.float32]) -> Sample | None:
        """What `see_sample` needs of the target's logits [n, V], as the model gave them; None when nobody asks."""
        return self._cutter.sample(logits) if self._cutter is not None else None

    def see_sample(self, tokens: Sequence[int], sample: Sample) -> None:
        """Look for a jump of topic: `sample` [n, ...] is of the rows that gave the last n of `tokens`."""
        if self._cutter is None:
            return
        for back in self._cutter.see(sample):
            start = anchor(tokens, len(tokens) - 1 - back)
            self.cuts.append(start)
            for proposer in self._continuations:
                proposer.cut(start)

    def settle(self, proposed: int, accepted: int, times: RoundTimes | None = None) -> None:
        """Learn from a verified round; call it for rounds without drafts too."""
        if not self._rests.settle():
            self._learn(proposed, accepted)
        elif self._rests.due:
            self._book_rests()
        if self.reads_signals:
            self._meter.settle(proposed, accepted)
        if self._refresh and times is not None:
            self._follow(times, proposed)

    def _learn(self, proposed: int, accepted: int) -> None:
        self._tokens += accepted + 1
        self._steps += self._used.cost if self._used is not None else 1.0
        for lane in self._lanes:
            lane.settle(proposed, accepted, lane is self._used)
        self._history = self._history.after(self._rules, proposed, accepted)

    def _follow(self, times: RoundTimes, proposed: int) -> None:
        """Correct the costs; what they mean for decisions is worked out every few rounds. Plain ones differ little."""
        self._plain += not proposed
        if not proposed and self._plain % _PLAIN_SAMPLE:
            return
        self._followed += 1
        for lane in self._lanes:
            # A draft that read a prompt first says nothing about the cost of drafting.
            drafted = proposed if lane is self._used and lane.unread <= 1 else 0
            lane.live_costs.follow(times.rows, times.target_ms, drafted, times.propose_ms)
            if self._followed % _REFRESH_ROUNDS == 0:
                lane.refresh()

    def rewind(self, length: int) -> None:
        """Only the first `length` tokens of the sequence are proven."""
        for lane in self._lanes:
            lane.proposer.rewind(length)
