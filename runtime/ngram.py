"""Prompt lookup: propose what followed when the sequence looked before as its end looks now.

Every occurrence of an n-gram is linked to the one before it, so adding a token costs one dictionary write and never
depends on the sequence's length. Keys are the tokens themselves: no two n-grams can collide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_LONGEST_COUNTED_MATCH = 32
_MOST_OCCURRENCES = 16  # looked at, newest first: what a lookup may cost is bounded on text that repeats itself
_WEIGHT = 4.0  # of an occurrence for each token that it matches more


class Match(NamedTuple):
    """An earlier place where the sequence looked as its end looks now.

    Attributes:
        start: index of the token that followed there.
        length: how many tokens before `start` equal the sequence's last tokens, counted up to 32.
        agreeing: occurrences of the shortest n-gram after which the same token followed; this one counts.
        occurrences: how many were looked at.
    """

    start: int
    length: int
    agreeing: int
    occurrences: int


class _Follower:
    """A token that followed, how many occurrences say so with what weight, and the longest of them."""

    __slots__ = ("agreeing", "length", "start", "votes")

    def __init__(self) -> None:
        self.votes = 0.0
        self.agreeing = self.length = self.start = 0


class NgramIndex:
    """Where each n-gram of a growing token sequence ended.

    Args:
        min_match: tokens of an n-gram; a shorter suffix is no match.
        max_match: longer common suffixes say no more than one of this length.
    """

    def __init__(self, min_match: int, max_match: int) -> None:
        self.min_match = min_match
        self.max_match = max_match
        self._votes = [
            _WEIGHT ** min(length, max_match) for length in range(max(_LONGEST_COUNTED_MATCH, min_match) + 1)
        ]
        self._newest: dict[tuple[int, ...], int] = {}
        self._before: list[int] = []  # end of an n-gram -> end of the same one before it, 0 when there is none
        self._indexed = 0

    def update(self, tokens: Sequence[int]) -> None:
        """Index what `tokens` has gained since the last call."""
        # An n-gram that ends the sequence has no continuation yet, so the last token waits for the next call.
        size, newest, before = self.min_match, self._newest, self._before
        for end in range(len(before), len(tokens)):
            key = tuple(tokens[max(end - size, 0) : end])
            before.append(newest.get(key, 0))
            newest[key] = end
        self._indexed = max(len(tokens) - 1, 0)

    def find(self, tokens: Sequence[int]) -> Match | None:
        """Where the likeliest next token followed: each occurrence of the end has a say, longer matches a larger one.
        Of those with that token the longest match, and of equals the newest.
        """
        size, before = self.min_match, self._before
        start = self._newest.get(tuple(tokens[-size:]), 0) if len(tokens) > size else 0
        if not start:
            return None
        followers: dict[int, _Follower] = {}
        looked_at = 0
        while start and looked_at < _MOST_OCCURRENCES:
            length, most = size, min(start, _LONGEST_COUNTED_MATCH)
            while length < most and tokens[start - 1 - length] == tokens[-1 - length]:
                length += 1
            follower = followers.get(tokens[start])
            if follower is None:
                follower = followers[tokens[start]] = _Follower()
            follower.votes += self._votes[length]
            follower.agreeing += 1
            if length > follower.length:  # newest first
                follower.length, follower.start = length, start
            looked_at += 1
            start = before[start]
        best = max(followers.values(), key=_votes)
        return Match(best.start, best.length, best.agreeing, looked_at)

    def truncate(self, length: int) -> None:
        """Only the first `length` tokens are still the same; when n-grams went past them, all are indexed
        anew.
        """
        if length <= self._indexed:
            self._newest.clear()
            self._before.clear()
            self._indexed = 0


def _votes(follower: _Follower) -> float:
    return follower.votes


def continuation(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """`count` tokens copied from `start`; a copy that reaches the end goes on with its own output, as in
    LZ77.
    """
    period = len(tokens) - start
    return [tokens[start + i % period] for i in range(count)]
