"""The maximum length of an engine's sequences, changed while it runs and no request is lost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dsc.runtime.kv_repairs import KvRepairs
from dsc.runtime.kv_slots import KvSlots
from dsc.runtime.request import Request, check_prompt


class EngineLength:
    """What new requests may have, and when the pool follows.

    Args:
        pool: of the engine's sequences.
        repairs: of the pool.

    Attributes:
        asked: another length is wanted, and the pool has not been told.
    """

    def __init__(self, pool: KvSlots, repairs: KvRepairs) -> None:
        self._pool = pool
        self._repairs = repairs
        self._wanted = pool.max_length
        self.asked = False

    @property
    def limit(self) -> int:
        """Most tokens of a request that comes now; a larger one when its memory is there."""
        return min(self._wanted, self._pool.max_length)

    def ask(self, max_length: int) -> None:
        """Want another maximum length.

        Raises:
            PlanError: it is not from 1 to what the bundle was compiled for.
        """
        self._repairs.check_length(max_length)
        self._wanted, self.asked = max_length, True

    def fit(self, request: Request, vocab_size: int) -> Request:
        """The request within the limit.

        Raises:
            GenerationError: its prompt leaves no room for an answer.
        """
        check_prompt(request.ids, vocab_size, self.limit)
        return replace(request, max_tokens=min(request.max_tokens, self.limit))

    def follow(self, waiting: Iterable[Request]) -> None:
        """Between two rounds: begin a change when all who wait fit; scans of the pool bring it about.

        Args:
            waiting: requests that were accepted and have no slot yet; they keep what they were promised.
        """
        if self.asked and all(request.max_tokens <= self._wanted for request in waiting):
            self._repairs.resize(self._wanted)
            self.asked = False
