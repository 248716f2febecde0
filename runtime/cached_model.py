"""A forward graph together with the valid rows of its cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dsc.runtime.kv_arena import KvZone

RowWatch = Callable[[NDArray[np.float32]], None]


class Forward(Protocol):
    """Runs rows of tokens through a graph whose KV rows are written in place.

    Attributes:
        chunk: most rows of one call.
    """

    chunk: int

    def forward(self, tokens: Sequence[int], past: int, n_logits: int) -> Any:
        """Logits [n_logits, V] of the last of `tokens`: an array, or on a device a handle that gives rows by index."""


class CachedModel:
    """Target or draft: what it has read of a token sequence, and the forward that reads on.

    Args:
        session: the model's forward graph, bound to the pools of `zone`.
        zone: the model's cache.
        max_length: most tokens that this model may read.

    Attributes:
        reads: it fills its cache itself, so it may have to catch up.
    """

    reads = True

    def __init__(self, session: Forward, zone: KvZone, max_length: int) -> None:
        self.max_length = max_length
        self.zone = zone
        self.session = session

    @property
    def length(self) -> int:
        """How many leading tokens of the sequence are in the cache."""
        return self.zone.length

    def read_up_to_last_chunk(self, tokens: Sequence[int]) -> None:
        """Read `tokens` in whole chunks until the rest, the last token included, fits one forward."""
        self.read_whole_chunks(tokens[self.length :])

    def read_whole_chunks(self, new: Sequence[int]) -> Sequence[int]:
        """Read whole chunks of `new`, which follow what is in the cache; the rest, at least one, fits one forward."""
        whole = (len(new) - 1) // self.session.chunk * self.session.chunk
        self.read(new[:whole])
        return new[whole:]

    def read(self, tokens: Sequence[int]) -> None:
        """Read `tokens` after what is in the cache, logits not wanted."""
        chunk = self.session.chunk
        for start in range(0, len(tokens), chunk):
            piece = tokens[start : start + chunk]
            self.forward(piece, 1)
            self.zone.commit(len(piece), len(piece))

    def forward(self, rows: Sequence[int], n_logits: int) -> NDArray[np.float32]:
        """Logits [n_logits, V] of the last of `rows`, which follow what is in the cache; nothing is
        committed. Those of a session on a device are a handle, see `Forward`.
        """
        self.zone.expect(len(rows))
        logits: NDArray[np.float32] = self.session.forward(rows, self.length, n_logits)
        return logits

    def draft(self, rows: Sequence[int], count: int, n_shared: int, watch: RowWatch | None) -> list[int]:
        """Read `rows`, then take the most likely token `count` times, each read before the next.

        Args:
            rows: at least one, at most a chunk; they follow what is in the cache.
            count: at least one.
            n_shared: only ids below it are taken.
            watch: sees each row of logits.
        """
        drafts: list[int] = []
        while True:
            logits: NDArray[np.float32] = self.forward(rows, 1)[0]  # [V]
            self.commit(len(rows), len(rows))
            if watch is not None:
                watch(logits)
            drafts.append(int(logits[:n_shared].argmax()))
            if len(drafts) == count:
                return drafts
            rows = drafts[-1:]

    def commit(self, written: int, kept: int) -> None:
        """Keep the first `kept` of the rows that the last forward wrote."""
        self.zone.commit(written, kept)

    def rewind(self, length: int) -> None:
        """Forget everything after the first `length` tokens."""
        self.zone.rewind(length)
