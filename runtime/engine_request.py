"""One request while an engine runs it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field

from dsc.runtime.decode import Block, consider, draft, propose
from dsc.runtime.generation import Generation
from dsc.runtime.packed_forward import Turn
from dsc.runtime.request import FinishReason
from dsc.runtime.speculator import Intent
from dsc.runtime.ticket import Ticket


@dataclass(eq=False)
class Running:
    """A request that has a slot.

    Attributes:
        sequence: its number in the pool.
        deadline: clock time at which it ends; None when it has all the time.
        closing: what to close when it ends.
        spent: milliseconds by phase before the round.
    """

    sequence: int
    ticket: Ticket
    generation: Generation
    deadline: float | None
    closing: ExitStack
    spent: dict[str, float] = field(default_factory=dict)

    @property
    def n_unread(self) -> int:
        """Tokens that the target has not read; 1 when it decodes."""
        run = self.generation.run
        return len(run.tokens) - run.target.length

    @property
    def decodes(self) -> bool:
        """Its prompt has been read but for the last token."""
        return self.n_unread == 1

    def why_end(self, now: float) -> FinishReason | None:
        """Why it ends before its next round."""
        if self.ticket.cancelled:
            return "cancelled"
        return "time" if self.deadline is not None and now >= self.deadline else None

    def read(self, rows: int) -> tuple[Turn, Block | None]:
        """The next `rows` of the prompt; a block when they are its last, which give the first token."""
        run = self.generation.run
        if rows >= self.n_unread:
            block = propose(run)
            return Turn(self.sequence, block.rows, block.n_logits), block
        return Turn(self.sequence, run.tokens[run.target.length : run.target.length + rows], 0), None

    def consider(self) -> Intent:
        """What a round of decoding would draft."""
        self.spent = self.ticket.stats.ms.copy()
        return consider(self.generation.run)

    def draft(self, intent: Intent, window: int) -> tuple[Turn, Block]:
        """A round of decoding, with at most `window` of the intended drafts."""
        block = draft(self.generation.run, intent, window, self.spent)
        return Turn(self.sequence, block.rows, block.n_logits), block
