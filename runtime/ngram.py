"""Prompt lookup: propose what followed the last time the sequence ended like this.

The index maps every n-gram of the sequence to where it last ended; adding a token costs one dictionary write a match
length and never depends on the sequence's length. Keys are the tokens themselves, so no two n-grams can collide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_LONGEST_COUNTED_MATCH = 32


@dataclass(frozen=True)
class Match:
    """An earlier place where the sequence looked as its end looks now.

    Attributes:
        start: index of the token that followed there.
        length: how many tokens before `start` equal the sequence's last tokens, counted up to 32.
    """

    start: int
    length: int


class NgramIndex:
    """Where each n-gram of a growing token sequence last ended.

    Args:
        min_match: shortest suffix that counts as a match, in tokens.
        max_match: longest suffix that is looked up; longer ones win over shorter ones.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        self.min_match = min_match
        self.max_match = max_match
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def update(self, tokens: Sequence[int]) -> None:
        """Index what `tokens` has gained since the last call."""
        # An n-gram that ends the sequence has no continuation yet, so the last token waits for the next call.
        for end in range(self._indexed + 1, len(tokens)):
            for length in range(self.min_match, min(self.max_match, end) + 1):
                self._ends[tuple(tokens[end - length : end])] = end
        self._indexed = max(len(tokens) - 1, 0)

    def find(self, tokens: Sequence[int]) -> Match | None:
        """The newest earlier occurrence of the longest suffix of `tokens` that has one."""
        for length in range(min(self.max_match, len(tokens) - 1), self.min_match - 1, -1):
            start = self._ends.get(tuple(tokens[len(tokens) - length :]))
            if start is not None:
                return Match(start, _common_suffix(tokens, start, length))
        return None

    def truncate(self, length: int) -> None:
        """Only the first `length` tokens are still the same; when n-grams went past them, all are indexed
        anew.
        """
        if length <= self._indexed:
            self._ends.clear()
            self._indexed = 0


def continuation(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """`count` tokens copied from `start`; a copy that reaches the end goes on with its own output, as in
    LZ77.
    """
    period = len(tokens) - start
    return [tokens[start + i % period] for i in range(count)]


def _common_suffix(tokens: Sequence[int], start: int, known: int) -> int:
    """Length of the longest common suffix of tokens[:start] and tokens, at least `known`."""
    length = known
    while length < min(start, _LONGEST_COUNTED_MATCH) and tokens[start - 1 - length] == tokens[-1 - length]:
        length += 1
    return length
