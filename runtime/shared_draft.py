"""A draft that continues the target's own cache: the target's weights at lower precision, over its keys and values.

It has nothing to read: what the target has read is there, and better than it could compute it. What it writes for its
drafts lies past the target's valid rows, where the target's next forward writes its own before it reads any of them.
So a shared cache changes what is proposed, never what is decided.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dsc.runtime.cached_model import CachedModel, Forward, RowWatch


class SharedDraft(CachedModel):
    """Drafts after what the target has read.

    Args:
        session: the draft's forward graph, bound to the pools of the target's zone.
        target: whose cache it is.
        max_length: most tokens that the draft may read.
    """

    reads = False

    def __init__(self, session: Forward, target: CachedModel, max_length: int) -> None:
        super().__init__(session, target.zone, max_length)
        self._ahead = 0  # rows of the present block, past the target's

    @property
    def length(self) -> int:
        """The target's valid rows and, while it drafts, its own behind them."""
        return self.zone.length + self._ahead

    def read(self, tokens: Sequence[int]) -> None:
        """Nothing: the target has read them."""

    def forward(self, rows: Sequence[int], n_logits: int) -> NDArray[np.float32]:
        """See `CachedModel.forward`."""
        self.zone.expect(self._ahead + len(rows))
        logits: NDArray[np.float32] = self.session.forward(rows, self.length, n_logits)
        return logits

    def draft(self, rows: Sequence[int], count: int, n_shared: int, watch: RowWatch | None) -> list[int]:
        """See `CachedModel.draft`; none of the rows counts afterwards."""
        try:
            return super().draft(rows, count, n_shared, watch)
        finally:
            self.zone.commit(self._ahead, 0)
            self._ahead = 0

    def commit(self, written: int, kept: int) -> None:
        """Keep rows as long as the block is drafted."""
        self._ahead += kept

    def rewind(self, length: int) -> None:
        """Nothing: its rows are the target's."""
