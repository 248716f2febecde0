"""Rounds in which no proposer is asked, because asking has led to nothing."""

from __future__ import annotations

# Looking takes up to 2 % of an int4 step, because a forward leaves little in the caches. After three rounds in a row
# whose offers were not worth a draft three rounds rest before the next look, and one for each eight in a row that
# found nothing to propose. In 80 chats, edits and quotations few rounds rest.
_PATIENCE, _DRY, _MOST = 3, 8, 3
_BOOKED = 4


class Rests:
    """Says which rounds rest.

    Attributes:
        resting: rounds that rest, the present one included.
        reason: why, as the statistics count it.
        unbooked: rested rounds that nobody's account knows of yet.

    Args:
        enabled: otherwise a look follows each round in which some proposer may draft.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._unpaid = self._dry = 0  # looks in a row whose offers were not worth a draft, or that found none
        self._next = 0  # rounds that rest after the present one
        self.resting = self.unbooked = 0
        self.reason = ""

    @property
    def deep(self) -> bool:
        """The present round rests and need not even look at the configuration, as one in four does."""
        return self.resting % _BOOKED > 0

    @property
    def due(self) -> bool:
        """What rested is to be booked."""
        return self.unbooked > 0 and not self.deep

    def nothing_offered(self, reason: str, waiting: int) -> None:
        """A look found no offer; for `waiting` rounds from the present one on there can be none."""
        self.reason = reason
        self.resting = waiting
        if not waiting:
            self._dry += 1
            self._next = min(self._dry // _DRY, _MOST)

    def offered(self, unpaid: str) -> None:
        """A look found offers that were worth a draft, or were not, for the reason `unpaid`."""
        self._dry = 0
        self._unpaid = self._unpaid + 1 if unpaid else 0
        if self._unpaid >= _PATIENCE:
            self.reason, self._next = unpaid, _MOST

    def wake(self) -> None:
        """The next round looks."""
        self.resting = self._next = 0

    def settle(self) -> bool:
        """A round is over; says whether it rested."""
        if self.resting:
            self.resting -= 1
            self.unbooked += 1
            return True
        self.resting, self._next = self._next if self._enabled else 0, 0
        return False
