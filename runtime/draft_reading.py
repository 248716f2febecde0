"""What of a sequence a draft model has read: all of it so far, or only what came after a late start.

A draft decides nothing, so it may leave out the beginning of a text and read its end as if it were all there is. It is
then right less often, but does not have to read a long prompt first, and its steps stay those of a short text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from dsc.bundle_schema.dflash_config import MAX_WINDOW

LATE_TOKENS = 32  # that a late start reads; drafts of SmolLM2-135M were as often right after 32 as after 128
# Tokens of the output that a late start needs: the end of a prompt says little of what follows. Of SmolLM2-135M's late
# drafts 0 to 40 % were right at the first token of an answer, 30 to 60 % before the eighth.
LATE_AFTER = 8


class DraftReading(ABC):
    """A proposer's place in the sequence.

    Attributes:
        start: tokens of the sequence before this one are never read.
        longest: most tokens that it may read.
        adaptive_rollback: after a rejection what was read of the drafts that held is kept, and drafting goes on from
            there; without it the whole block is forgotten and what held is read again.
    """

    start = 0
    longest: int
    adaptive_rollback = True
    _block = (0, 0)  # places of the newest drafts in the sequence

    @property
    @abstractmethod
    def n_read(self) -> int:
        """Tokens read from `start` on."""

    @abstractmethod
    def forget(self, n_kept: int) -> None:
        """Only the first `n_kept` of the tokens that were read count."""

    def starts(self, tokens: Sequence[int], generated: int) -> tuple[int, ...]:
        """Where its reading could start before the next draft: as it is, at the beginning, or late, where the last
        `generated` tokens are output.
        """
        late = len(tokens) - 1 - LATE_TOKENS
        others = [0] if self.start and len(tokens) + MAX_WINDOW <= self.longest else []
        if self.lag(tokens) > LATE_TOKENS and generated >= LATE_AFTER:
            others.append(late)
        return (self.start, *others)

    def begin(self, start: int) -> None:
        """Start reading at `start`; what was read from another place on is of no use."""
        if start != self.start:
            self.start = start
            self.forget(0)

    def note_drafts(self, tokens: Sequence[int], count: int) -> None:
        """`count` drafts follow `tokens`."""
        self._block = (len(tokens), len(tokens) + count)

    def lag(self, tokens: Sequence[int], start: int | None = None) -> int:
        """Tokens not read yet, the last one not counted, if reading starts or has started at `start`."""
        if start is None or start == self.start:
            return max(len(tokens) - 1 - self.start - self.n_read, 0)
        return max(len(tokens) - 1 - start, 0)

    def rewind(self, length: int) -> None:
        """Only the first `length` tokens of the sequence are still the same."""
        first, end = self._block
        if not self.adaptive_rollback and first <= length < end:
            length = first
        if length <= self.start:
            self.begin(0)
        self.forget(length - self.start)
