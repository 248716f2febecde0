"""What followed the same text last time, by fingerprint, and a proposer that drafts it again.

A key is a 64-bit rolling hash (FNV-1a over token ids) of a prompt and of the tokens generated after it, taken where
the prompt ends and every 64 tokens from there. The value holds the tokens up to that place and what followed them, so
that a match is proven on the tokens: a fingerprint alone is never trusted. Entries leave in the order of their last
use when there are too many of them, or too many bytes.

Where a text jumps to another topic (`dsc.runtime.semantic_cut`) a new space of fingerprints starts: keys after the jump
are taken of the tokens since then, as if they were a text of their own, and the same passage is known again behind
another beginning.
"""

from __future__ import annotations

import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from dsc.bundle_schema.dflash_config import ContinuationCache as CacheConfig
from dsc.bundle_schema.dflash_config import ProposerKind
from dsc.bundle_schema.errors import HostError, RequestError
from dsc.bundle_schema.whole_file import whole_file
from dsc.runtime.proposers import Lookup

SEGMENT = 64  # tokens between keys; a continuation is twice as long, so that windows are not cut at the next key
CONTEXT = 32  # tokens after a jump that stand for a prompt
_ANCHORS = 8  # tokens from which the start of a new space is chosen
_OFFSET, _PRIME, _TURN, _MASK = 0xCBF29CE484222325, 0x100000001B3, 0x9E3779B97F4A7C15, 2**64 - 1
_COLUMNS = ("lengths", "starts", "prompts", "seen")


class Fingerprint:
    """The rolling hash of a growing sequence, and its value at the newest place that may have an entry.

    Args:
        n_prompt: tokens of the sequence that are its prompt.
        bits: of the hash that are kept.
    """

    def __init__(self, n_prompt: int, bits: int) -> None:
        self.n_tokens = 0
        self.place = 0
        self.value = 0
        self._n_prompt = n_prompt
        self._shift = 64 - bits
        self._state = _OFFSET

    def roll(self, tokens: Sequence[int]) -> bool:
        """Take in what `tokens` has gained; says whether a place with a key was passed."""
        passed = False
        state = self._state
        for index in range(self.n_tokens, len(tokens)):
            state = ((state ^ (tokens[index] + 1)) * _PRIME) & _MASK
            generated = index + 1 - self._n_prompt
            if generated == 0:
                state = ((state ^ _TURN) * _PRIME) & _MASK
            if generated >= 0 and generated % SEGMENT == 0:
                self.place, self.value, passed = index + 1, state >> self._shift, True
        self._state = state
        self.n_tokens = max(len(tokens), self.n_tokens)
        return passed


@dataclass
class Continuation:
    """A text and what followed it.

    Attributes:
        tokens: int32 [n], the text and then its continuation.
        start: where the continuation begins.
        n_prompt: how many of the tokens were the prompt.
        seen: how many times in a row the same followed.
    """

    tokens: NDArray[np.int32]
    start: int
    n_prompt: int
    seen: int = 1


@dataclass
class CacheCounts:
    """What lookups found since the cache was made; a collision is a fingerprint that matched on other tokens."""

    lookups: int = 0
    hits: int = 0
    collisions: int = 0
    evictions: int = 0


class ContinuationCache:
    """Continuations of earlier texts, least recently used ones first to go.

    Args:
        config: bounds, and the width of fingerprints.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.counts = CacheCounts()
        self.nbytes = 0
        self.bits = config.fingerprint_bits
        self._entries: OrderedDict[int, Continuation] = OrderedDict()
        self.configure(config)

    def __len__(self) -> int:
        return len(self._entries)

    def configure(self, config: CacheConfig) -> None:
        """Take new bounds; the width of fingerprints stays."""
        self._max_entries = config.entries
        self._max_nbytes = config.max_nbytes
        self._evict()

    def clear(self) -> None:
        """Forget every text."""
        self._entries.clear()
        self.nbytes = 0

    def find(self, key: int, tokens: Sequence[int], place: int) -> Continuation | None:
        """The entry for the first `place` of `tokens`, proven on the tokens."""
        self.counts.lookups += 1
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.start != place or not np.array_equal(entry.tokens[:place], np.asarray(tokens[:place], np.int32)):
            self.counts.collisions += 1
            return None
        self.counts.hits += 1
        self._entries.move_to_end(key)
        return entry

    def remember(self, tokens: Sequence[int], n_prompt: int, cuts: Sequence[int] = ()) -> None:
        """Keep what followed `n_prompt` tokens, in the place of what was known.

        Args:
            cuts: where new spaces of fingerprints start, rising, after the prompt.
        """
        start = 0
        for cut in (*(cut for cut in cuts if cut < len(tokens)), None):
            end = len(tokens) if cut is None else cut
            # What follows a jump is proposed up to where the new space may know more.
            self._remember(tokens[start : end + 2 * SEGMENT], n_prompt, end - start)
            start, n_prompt = end, CONTEXT

    def _remember(self, tokens: Sequence[int], n_prompt: int, end: int) -> None:
        """Keep what followed at the places before `end`."""
        text = np.asarray(tokens, np.int32)
        fingerprint = Fingerprint(n_prompt, self.bits)
        for place in range(n_prompt, end, SEGMENT):
            fingerprint.roll(tokens[:place])
            self._put(fingerprint.value, Continuation(text[: place + 2 * SEGMENT].copy(), place, n_prompt))

    def _put(self, key: int, entry: Continuation) -> None:
        old = self._entries.pop(key, None)
        if old is not None:
            self.nbytes -= old.tokens.nbytes
            if old.start == entry.start and np.array_equal(old.tokens, entry.tokens):
                entry.seen += old.seen
        self._entries[key] = entry
        self.nbytes += entry.tokens.nbytes
        self._evict()

    def _evict(self) -> None:
        while self._entries and (len(self._entries) > self._max_entries or self.nbytes > self._max_nbytes):
            _, entry = self._entries.popitem(last=False)
            self.nbytes -= entry.tokens.nbytes
            self.counts.evictions += 1

    def save(self, path: Path, identity: str) -> None:
        """Write all entries, oldest first; an older file is replaced when the new one is complete.

        Args:
            identity: of the model whose tokens they are.

        Raises:
            HostError: the file cannot be written.
        """
        entries = list(self._entries.values())
        arrays = {
            "identity": np.frombuffer(identity.encode(), np.uint8),
            "tokens": np.concatenate([np.empty(0, np.int32), *(entry.tokens for entry in entries)]),
            "lengths": np.array([len(entry.tokens) for entry in entries], np.int64),
            "starts": np.array([entry.start for entry in entries], np.int64),
            "prompts": np.array([entry.n_prompt for entry in entries], np.int64),
            "seen": np.array([entry.seen for entry in entries], np.int64),
        }
        try:
            with whole_file(path) as file:
                Path(file.name).chmod(0o600)  # it holds what was said
                np.savez(file, allow_pickle=False, **arrays)
        except OSError as error:
            raise HostError(str(path), f"continuations cannot be written: {error.strerror}") from error

    def load(self, path: Path, identity: str, vocab_size: int) -> int:
        """Add the entries of a file and return how many; a file that is not sound adds none.

        Raises:
            RequestError: the file is missing, damaged, or of another model.
        """
        arrays = _read(path)
        if arrays["identity"].tobytes() != identity.encode():
            raise RequestError(str(path), "continuations of this model are required, got those of another")
        entries = _entries(arrays, vocab_size)
        if entries is None:
            raise RequestError(str(path), "the continuations are damaged", "delete the file")
        for entry in entries:
            fingerprint = Fingerprint(entry.n_prompt, self.bits)
            fingerprint.roll(entry.tokens[: entry.start].tolist())
            self._put(fingerprint.value, entry)
        return len(entries)


def _read(path: Path) -> dict[str, NDArray[np.int64]]:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in ("identity", "tokens", *_COLUMNS)}
    except FileNotFoundError:
        raise RequestError(str(path), "a file of continuations is required, got none") from None
    except (OSError, ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        raise RequestError(str(path), f"the continuations cannot be read: {error}", "delete the file") from error


def _entries(arrays: dict[str, NDArray[np.int64]], vocab_size: int) -> list[Continuation] | None:
    """The entries of a file, None when its arrays contradict each other."""
    tokens, columns = arrays["tokens"], [arrays[name] for name in _COLUMNS]
    if any(array.ndim != 1 or array.dtype.kind != "i" for array in (tokens, *columns)):
        return None
    lengths, starts, prompts, seen = columns
    if len({len(column) for column in columns}) != 1 or int(lengths.sum()) != len(tokens):
        return None
    in_order = (prompts >= 1) & (prompts <= starts) & (starts < lengths) & ((starts - prompts) % SEGMENT == 0)
    if not in_order.all() or (seen < 1).any() or ((tokens < 0) | (tokens >= vocab_size)).any():
        return None
    pieces = np.split(tokens.astype(np.int32), np.cumsum(lengths)[:-1]) if len(lengths) else []
    numbers = zip(starts.tolist(), prompts.tolist(), seen.tolist(), strict=True)
    return [Continuation(piece.copy(), *row) for piece, row in zip(pieces, numbers, strict=True)]


def anchor(tokens: Sequence[int], place: int) -> int:
    """Where the space after a jump at `place` starts: by the tokens there, so that near places share a start."""
    near = range(place, min(place + _ANCHORS, len(tokens)))
    return min(near, key=lambda index: ((tokens[index] + 1) * _TURN) & _MASK)


class ContinuationProposer(Lookup):
    """Drafts what followed the same text last time; made anew for each request.

    Args:
        cache: shared by all requests of a model.
        n_prompt: tokens of the sequence that are its prompt.
    """

    kind: ProposerKind = "cache"
    # First and later acceptance for a continuation seen once, or the same more than once.
    _PRIORS: ClassVar[dict[str, tuple[float, float]]] = {"once": (0.8, 0.95), "often": (0.95, 0.98)}

    def __init__(self, cache: ContinuationCache, n_prompt: int) -> None:
        self._cache = cache
        self._fingerprint = Fingerprint(n_prompt, cache.bits)
        self._entry: Continuation | None = None
        self._start = 0  # of the present space
        self._base = 0  # of the entry's
        self._known = 0  # tokens of the sequence from there on that equal the entry's

    def cut(self, start: int) -> None:
        """A new space starts at this token; what is being proposed goes on as long as it is right."""
        self._start = start
        self._fingerprint = Fingerprint(CONTEXT, self._cache.bits)

    def look(self, tokens: Sequence[int]) -> str | None:
        """How often the same followed, None when nothing is known to."""
        space = tokens[self._start :]
        if self._fingerprint.roll(space):
            place = self._fingerprint.place
            found = self._cache.find(self._fingerprint.value, space, place)
            if found is not None:
                self._entry, self._base, self._known = found, self._start, place
        entry = self._entry
        if entry is None:
            return None
        tokens = tokens[self._base :]
        if entry.tokens[self._known : len(tokens)].tolist() != list(tokens[self._known :]):
            self._entry = None
            return None
        self._known = len(tokens)
        return None if len(entry.tokens) <= len(tokens) else "often" if entry.seen > 1 else "once"

    def silence(self, tokens: Sequence[int]) -> str:
        """Nothing is known, or it is used up."""
        return "no proposal"

    def room(self, tokens: Sequence[int]) -> int:
        """What is left of the continuation."""
        return self._base + len(self._entry.tokens) - len(tokens) if self._entry is not None else 0

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Copy it."""
        assert self._entry is not None
        start = len(tokens) - self._base
        drafts: list[int] = self._entry.tokens[start : start + count].tolist()
        return drafts

    def rewind(self, length: int) -> None:
        """Nothing to do: a sequence only grows between two looks of a request."""

    def prior(self, kind: str) -> tuple[float, float]:
        """By how often the same followed."""
        return self._PRIORS[kind]
