"""Falling back to plain decoding so that speculation never costs more than a stated share of the run.

The rule is an account in units of one plain decoding step. Every committed token earns the allowance; a speculative
round earns the tokens it committed and pays what it cost, what a draft model reads before it included. A round is only
begun when the account covers its worst case, all drafts rejected. So after n tokens the loss against plain decoding is
at most ``start + allowance * n``, whatever the text is. When the account cannot pay, a cool-down of plain rounds
begins; after it one probe is tried as soon as the account covers it, and a probe that fails doubles the next cool-down.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsc.bundle_schema.dflash_config import Fallback

# Tokens of an answer from which on lookups lose no more than the stated share. With less to start with, a text whose
# first copies fail is decoded plainly until it repeats itself again: in a simulation of 80 chats, edits and quotations
# of 64 tokens, the start of 32 instead of 64 tokens made quotations 2 % slower at int4, and edits 1 %.
SHORT_ANSWER = 32
# Of the overhead, for drafts that fail: measured losses are about half a percent more than was thought, and looking
# takes up to one and a half where much is found that fails. With a third an int4 model lost 3 to 4 % there. In a
# simulation a third instead of a half made edits 0.7 % slower, and quotations 2 to 4 %.
_FAILED_SHARE = 1 / 4
_LARGEST_STAKE = 0.5
_LEAST_MODEL_START, _MODEL_START = 1.5, 5.0
_CEILING = 12.0  # an early success must not pay for a long failure later, but may for reading a prompt


class SpeculationAccount:
    """What speculation may still lose in one request, in plain decoding steps.

    Attributes:
        balance: what it may lose now.
        waiting: rounds that a cool-down still lasts.

    Args:
        config: the share of time that may be lost, and the lengths of cool-downs in rounds.
        start: what a request may lose before it has earned anything; for lookups, when None, `lookup_start`.
        share: of the overhead, where several proposers have an account each.
    """

    def __init__(self, config: Fallback, start: float | None = None, share: float = 1.0) -> None:
        # The rest covers the start, looking, and costs that are not what they were thought to be.
        self.allowance = config.max_overhead * _FAILED_SHARE * share
        self.balance = lookup_start(config, share) if start is None else start
        self._config = config
        self._cooldown = config.cooldown_rounds
        self.waiting = 0
        self._probing = 0

    def admit(self, costs: Sequence[float], chance: float = 0.5) -> int:
        """The largest window that may be drafted now. Who stakes everything is out after the first mistake: drafts
        past the first may cost at most the square of `chance`, and at most half, of what a failed first one would
        leave. (Kelly 1956 stakes `chance` itself where a success repays many times the stake; what is known of it
        here is rough.)

        Args:
            costs: entry k is the cost of a round with k drafts; entry 0 is a plain round's.
            chance: that the first draft holds.
        """
        if self.waiting > 0 or len(costs) == 1:
            return 0
        left = self.balance - (costs[1] - 1)
        if left < 0:
            self._cool_down()
            return 0
        stake = min(chance * chance, _LARGEST_STAKE) * left
        window = len(costs) - 1
        while costs[window] - costs[1] > stake:
            window -= 1
        return window

    def settle(self, drafted: int, accepted: int, cost: float, looked: float = 0.0, draft: float = 0.0) -> None:
        """Book a round of `drafted` drafts that cost `cost` steps; a plain round drafted none and cost 1.

        Args:
            looked: steps that looking for a proposal took.
            draft: what one draft that fails would cost, with what has to be read first; looking leaves as much, or
                nothing could ever be tried again.
        """
        self.waiting = max(self.waiting - 1, 0)
        earned = (accepted + 1) * (1 + self.allowance)
        self.balance = min(self.balance + earned - cost, _CEILING)
        self.balance = max(self.balance - looked, min(self.balance, draft))
        if drafted and self._probing:
            self._settle_probe(accepted)

    def rest(self, rounds: int) -> None:
        """As `settle` of so many plain rounds."""
        self.waiting = max(self.waiting - rounds, 0)
        self.balance = min(self.balance + rounds * self.allowance, _CEILING)

    def _settle_probe(self, accepted: int) -> None:
        self._probing -= 1
        if accepted == 0:
            self._cooldown = min(2 * self._cooldown, self._config.max_cooldown_rounds)
            self._cool_down()
        elif self._probing == 0:
            self._cooldown = self._config.cooldown_rounds

    def _cool_down(self) -> None:
        self.waiting = self._cooldown
        self._probing = self._config.probe_rounds


def lookup_start(config: Fallback, share: float = 1.0) -> float:
    """The start for lookups: the allowance of a short answer."""
    return SHORT_ANSWER * config.max_overhead * _FAILED_SHARE * share


def shared_start(first_draft: float) -> float:
    """The start for a draft that has nothing to read and whose round with one draft costs `first_draft`: two failures,
    at most what a draft model may lose.
    """
    return min(2 * (first_draft - 1), _MODEL_START)


def model_start(round_cost: float, reading: float = 0.0) -> float:
    """The start for a draft model whose full round costs `round_cost`: two failed rounds and a first `reading`, within
    bounds.

    A model's quality hardly depends on the text, so one early failure says little; and once it pauses, reading what it
    missed makes coming back dear. Five steps are the reading of a short prompt or a late start with two failed rounds
    after it, and 3 % of an answer of 250 tokens together with the allowance. On shorter answers that would be more than
    a text may cost, so they are lent once: a request starts with what the one before has left.
    """
    return min(max(2 * (round_cost - 1) + reading, _LEAST_MODEL_START), _MODEL_START)
