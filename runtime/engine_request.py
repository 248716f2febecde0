"""One request while an engine runs it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from dsc.runtime.decode import Block, propose
from dsc.runtime.generation import Generation
from dsc.runtime.packed_forward import Turn
from dsc.runtime.request import FinishReason
from dsc.runtime.ticket import Ticket


@dataclass(eq=False)
class Running:
    """A request that has a slot.

    Attributes:
        sequence: its number in the pool.
        deadline: clock time at which it ends; None when it has all the time.
        closing: what to close when it ends.
    """

    sequence: int
    ticket: Ticket
    generation: Generation
    deadline: float | None
    closing: ExitStack

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

    def block(self) -> tuple[Turn, Block]:
        """A round of decoding, or the last piece of the prompt and the first token."""
        block = propose(self.generation.run)
        return Turn(self.sequence, block.rows, block.n_logits), block

    def piece(self, rows: int) -> Turn:
        """A piece of the prompt."""
        run = self.generation.run
        return Turn(self.sequence, run.tokens[run.target.length : run.target.length + rows], 0)
