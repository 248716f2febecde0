"""One proposer as the scheduler sees it: what it can offer, what it costs, and what it may still lose."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dsc.bundle_schema.dflash_config import DflashConfig, Fallback
from dsc.bundle_schema.dflash_config import Proposer as ProposerRow
from dsc.runtime.acceptance import AcceptanceModel, RoundCosts
from dsc.runtime.draft_reading import LATE_TOKENS
from dsc.runtime.fallback import SpeculationAccount, lookup_start, model_start, shared_start
from dsc.runtime.proposers import Proposer
from dsc.runtime.schedule_costs import LiveCosts, round_table
from dsc.runtime.schedule_policy import Offer, best_window

COOL_DOWN = "cool-down"
# Tokens that a proposer may have missed and still pay for in one round; reading more is an investment in those to come.
SHORT_LAG = 16
# Tokens to come that an investment may count on, where the request allows more: end tokens come before most limits.
# Texts that have grown longer than this are expected to double.
TYPICAL_TOKENS = 256
# Of them that the reader will have a part in: lookups and plain rounds give the others.
OWN_SHARE = 1 / 3
# Milliseconds that looking for a proposal and booking the round take, after a forward that leaves little in the caches.
LOOK_MS = 0.1


class Lane:
    """A proposer, its acceptance by kind of proposal, its costs and its account.

    Args:
        index: its place among the request's proposers.
        costs: of rounds with this proposer.
        cap: most drafts that the request allows.
        account: None drafts whatever it costs.
    """

    def __init__(
        self, index: int, proposer: Proposer, costs: LiveCosts, config: DflashConfig, cap: int, share: float | None
    ) -> None:
        self.index = index
        self.proposer = proposer
        self.live_costs = costs
        self.refresh()
        self.configure(config, cap)
        self.account = None
        if share is not None:
            self.account = SpeculationAccount(config.fallback, self._stake(config.fallback, share), share)
        self._acceptance: dict[str, AcceptanceModel] = {}
        self._looked_at: dict[str, int] = {}  # the round until which a kind's acceptance has faded
        self._rounds = 0
        self._kind: str | None = None
        self._looked = 0.0  # plain steps that looking took since the last round
        self.start = 0  # tokens that it leaves out
        self.cost = 1.0  # plain steps of the last drafted round, with what it read
        self.catch_up = 0.0  # steps that the last draft spent on reading what it had missed
        self.unread = 0  # tokens that it read first, those of a prompt included

    def _stake(self, config: Fallback, share: float) -> float:
        """What a request may lose before it has earned anything."""
        left = self.proposer.left
        if self.proposer.reads:
            return _lent(model_start(self._table[self._cap], self._late_reading), left)
        if not self.proposer.sizes_blocks:
            return _lent(shared_start(self._table[1]), left, self._least)
        # Two drafts that fail at once would else end the copying of many texts; who has copied may try as often again.
        own = lookup_start(config, share)
        return _lent(2 * own, own if left is None else left, own)

    def configure(self, config: DflashConfig, cap: int) -> None:
        """Take the proposer's row of the table; a configuration may change between rounds."""
        self.proposer.adaptive_rollback = config.adaptive_rollback
        row = config.proposers.get(self.proposer.kind, ProposerRow())
        self._cap = min(cap, row.max_window)
        self._enabled = row.enabled
        self._max_context = row.max_context
        self._memory = 1 / config.calibrated.decay if config.calibrated.decay > 0 else 1e9
        self._prior_rounds = float(config.calibrated.prior_rounds)

    def refresh(self) -> None:
        """Follow the live costs."""
        self._look_cost = LOOK_MS / self.live_costs.verify_ms()[0]
        self._costs = self.live_costs.costs()
        self._table = _with_looking(round_table(self._costs), self._look_cost)
        self._late_costs = self.live_costs.costs(late=True)
        self._late_table = _with_looking(round_table(self._late_costs), self._look_cost)
        self._late_reading = self._late_costs.catch_up(LATE_TOKENS) if self.proposer.reads else 0.0
        self._least = self._table[1] - 1 + self._late_reading  # what one draft takes

    def offer(self, tokens: Sequence[int], room: int, generated: int = 0, rate: float = 1.0) -> Offer | str:
        """What it can do now, or why nothing.

        Args:
            room: drafts that the request still has room for.
            generated: tokens of the request's output so far.
            rate: committed tokens a plain step so far, which a model that has to read a text first must beat.
        """
        self._kind, self.cost = None, 1.0
        limit = min(self._cap, room)
        if limit < 1:
            return "no room"
        if not self._enabled:
            return "disabled"
        if len(tokens) > self._max_context:
            return "context too long"
        if self.account is not None and self.account.waiting:
            return COOL_DOWN
        self._looked = self._look_cost
        kind = self.proposer.look(tokens)
        if kind is None:
            return self.proposer.silence(tokens)
        limit = min(limit, self.proposer.room(tokens))
        starts = self.proposer.starts(tokens, generated)
        if not starts:
            self._kind = kind
            return Offer(self.index, limit, self._expect(kind), self._table, self.proposer.sizes_blocks)
        to_come = OWN_SHARE * min(room + 1, max(TYPICAL_TOKENS, generated))
        offers = [(self._offer_from(start, tokens, limit, to_come), start) for start in starts]
        offer, self.start = offers[0]
        if self.account is not None:
            covered = [(offer, start) for offer, start in offers if self._may_read(start, tokens)]
            if not covered:
                return "reading not covered"
            offer, self.start = max(covered, key=lambda pair: best_window(pair[0])[1])
            if self.proposer.lag(tokens, self.start) > SHORT_LAG and best_window(offer)[1] <= rate:
                return "reading does not pay"
        self._kind = self.proposer.kind_from(self.start)
        return offer

    def _offer_from(self, start: int, tokens: Sequence[int], limit: int, to_come: float) -> Offer:
        """What it can do if it has read from `start` on; reading more than a little must pay in `to_come` tokens."""
        costs, rounds = self._costs_from(start)
        table: Sequence[float] = rounds
        acceptance = self._expect(self.proposer.kind_from(start))
        lag = self.proposer.lag(tokens, start)
        if lag:
            given = acceptance.expected(limit)
            table = _with_reading(table, costs.catch_up(lag), given, to_come if lag > SHORT_LAG else 0)
        return Offer(self.index, limit, acceptance, table, self.proposer.sizes_blocks)

    def _may_read(self, start: int, tokens: Sequence[int]) -> bool:
        """Whether what the account has left covers reading from `start` on and a first draft that fails."""
        lag = self.proposer.lag(tokens, start)
        costs, table = self._costs_from(start)
        assert self.account is not None
        return lag <= SHORT_LAG or costs.catch_up(lag) + table[1] - 1 <= self.account.balance

    def _costs_from(self, start: int) -> tuple[RoundCosts, list[float]]:
        """Costs, and those of rounds, if it has read from `start` on."""
        return (self._late_costs, self._late_table) if start else (self._costs, self._table)

    def _expect(self, kind: str) -> AcceptanceModel:
        model = self._acceptance.get(kind)
        if model is not None:
            model.fade(self._rounds - self._looked_at[kind])
        else:
            first, later = self.proposer.prior(kind)
            model = AcceptanceModel(first, later, self._prior_rounds, self._memory)
            self._acceptance[kind] = model
        self._looked_at[kind] = self._rounds
        return model

    def draft(self, tokens: Sequence[int], window: int) -> list[int]:
        """Up to `window` drafts, fewer or none when the account cannot pay for them."""
        known, table = self._costs_from(self.start)
        self.unread = lag = self.proposer.lag(tokens, self.start)
        self.catch_up = known.catch_up(lag) if lag else 0.0
        costs = [table[0], *(cost + self.catch_up for cost in table[1 : window + 1])]
        if self.account is not None:
            assert self._kind is not None
            (chance,) = self._acceptance[self._kind].survivals(1)
            window = self.account.admit(costs, chance)
        if window == 0:
            return []
        self.cost = costs[window]
        self.proposer.begin(self.start)
        return self.proposer.propose(tokens, window)

    def settle(self, drafted: int, accepted: int, used: bool) -> None:
        """A round is over; `used` says whether this lane made its drafts."""
        if used and self._kind is not None and drafted:
            self._acceptance[self._kind].observe(drafted, accepted)
        self._rounds += 1
        if self.account is not None:
            # What other lanes won is not this lane's to lose; each token earns it the allowance alone.
            cost = self.cost if used else accepted + 1.0
            looked = 0.0 if used else self._looked  # a drafted round's cost has it
            self.account.settle(drafted if used else 0, accepted, cost, looked, self._least)
            self._keep(self.account)
        self._looked = 0.0  # the next round may not look

    @property
    def waiting(self) -> int:
        """Rounds for which it will offer nothing."""
        return self.account.waiting if self.account is not None else 0

    def rest(self, rounds: int) -> None:
        """As `settle` of so many rounds in which nobody was asked."""
        self._rounds += rounds
        if self.account is not None:
            self.account.rest(rounds)
            self._keep(self.account)

    def _keep(self, account: SpeculationAccount) -> None:
        self.proposer.left = account.balance


def _lent(full: float, left: float | None, least: float = 0.0) -> float:
    """What a request may lose before it has earned anything: what the one before has `left` of `full`, or `least`."""
    return full if left is None else min(max(left, least), full)


def _with_looking(table: Sequence[float], look: float) -> list[float]:
    """The costs of rounds with `look` for each that drafts."""
    return [table[0], *(cost + look for cost in table[1:])]


def _with_reading(
    table: Sequence[float], reading: float, given: Iterable[float], tokens_to_come: float
) -> Sequence[float]:
    """The costs of rounds with the share of `reading` steps that each has to earn: all of it, or where it is an
    investment in `tokens_to_come`, that of the tokens which the round is expected to give.
    """
    if not tokens_to_come:
        return [table[0], *(cost + reading for cost in table[1:])]
    shares = (reading * tokens / tokens_to_come for tokens in given)
    return [table[0], *(cost + share for cost, share in zip(table[1:], shares, strict=False))]
