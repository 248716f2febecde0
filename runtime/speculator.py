"""Decides, before each round, how many tokens to draft, and learns from how it went.

Decisions depend on the tokens and on costs measured beforehand, never on a clock: the same bundle, prompt and
seed take the same decisions on every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dsc.bundle_schema.dflash_config import MAX_WINDOW, DflashConfig
from dsc.bundle_schema.dflash_config import Proposer as ProposerTable
from dsc.bundle_schema.errors import RequestError
from dsc.runtime.acceptance import AcceptanceModel, RoundCosts, best_window
from dsc.runtime.fallback import LOOKUP_START, SpeculationAccount, model_start
from dsc.runtime.proposers import Proposer


class SpeculationOptions(BaseModel):
    """How one call speculates; what is None is taken from the bundle's configuration.

    Attributes:
        proposer: ``ngram``, or the bundle's draft (``model``, ``self``).
        window: drafts a round. Without it the configured policy decides; prompt lookup always takes the window that
            gives the most expected tokens for its measured cost.
        max_window: cap of a window that is not given.
        fallback: decode plainly while speculation does not pay; without it every round drafts what it can.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    proposer: str | None = None
    window: Annotated[int, Field(ge=0, le=MAX_WINDOW)] | None = None
    max_window: Annotated[int, Field(ge=1, le=MAX_WINDOW)] | None = None
    fallback: bool | None = None


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
        field = ".".join(map(str, first["loc"]))
        raise RequestError(f"speculation.{field}", f"{first['msg']}, got {first['input']!r}") from error


@dataclass(frozen=True)
class Draft:
    """The drafts of one round, or why there are none."""

    ids: tuple[int, ...] = ()
    reason: str = ""


class Speculator:
    """One request's speculation: a proposer, what it has been worth so far, and what it may still lose.

    Args:
        proposer: drafts.
        costs: of rounds with this proposer on this device.
        options: the request's.
        config: the bundle's.
    """

    def __init__(
        self, proposer: Proposer, costs: RoundCosts, options: SpeculationOptions, config: DflashConfig
    ) -> None:
        self.name = proposer.kind
        self._proposer = proposer
        self._costs = costs
        self._window = options.window
        if options.window is None and config.policy == "fixed" and not proposer.sizes_blocks:
            self._window = config.windows.default
        cap = self._window if self._window is not None else options.max_window or config.windows.max
        table = config.proposers.get(proposer.kind, ProposerTable())
        self._cap = min(cap, table.max_window) if options.window is None else cap
        self._max_context = table.max_context
        fallback = config.fallback.enabled if options.fallback is None else options.fallback
        start = LOOKUP_START if proposer.sizes_blocks else model_start(costs.round(self._cap))
        self._account = SpeculationAccount(config.fallback, start) if fallback else None
        self._acceptance: dict[str, AcceptanceModel] = {}
        self._kind: str | None = None
        self._cost = 1.0
        self._started = False

    def propose(self, tokens: Sequence[int], room: int) -> Draft:
        """Drafts to follow `tokens`, at most `room` of them."""
        self._kind, self._cost = None, 1.0
        if min(self._cap, room) < 1:
            return Draft(reason="no room")
        if len(tokens) > self._max_context:
            return Draft(reason="context too long")
        kind = self._proposer.look(tokens)
        if kind is None:
            return Draft(reason=self._proposer.silence(tokens))
        limit = min(self._cap, room, self._proposer.room(tokens))
        window, reason = self._choose(kind, limit, tokens)
        if window == 0:
            return Draft(reason=reason)
        self._kind, self._started = kind, True
        return Draft(tuple(self._proposer.propose(tokens, window)))

    def _choose(self, kind: str, limit: int, tokens: Sequence[int]) -> tuple[int, str]:
        """The window, and why it is 0 when it is."""
        acceptance = self._acceptance.setdefault(kind, AcceptanceModel(*self._proposer.prior(kind)))
        window = limit if self._window is not None else best_window(acceptance, self._costs, limit)
        if window == 0:
            return 0, "does not pay"
        # Reading the prompt is the draft's prefill; only what it missed since then counts as a cost of this
        # round.
        lag = self._proposer.lag(tokens) if self._started else 0
        costs = [self._costs.round(k) + (self._costs.catch_up(lag) if k else 0.0) for k in range(window + 1)]
        if self._account is not None:
            window = self._account.admit(costs)
        self._cost = costs[window]
        return window, "cool-down"

    def settle(self, proposed: int, accepted: int) -> None:
        """Learn from a verified round; call it for rounds without drafts too."""
        if self._kind is not None:
            self._acceptance[self._kind].observe(proposed, accepted)
        for model in self._acceptance.values():
            model.fade()
        if self._account is not None:
            self._account.settle(proposed, accepted, self._cost)

    def rewind(self, length: int) -> None:
        """Only the first `length` tokens of the sequence are proven."""
        self._proposer.rewind(length)
