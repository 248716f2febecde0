"""Keys and values of texts that were read lately, so that a prompt that begins like one of them is not read again.

An entry holds a text's tokens and a copy of its rows in every layer of target and draft. What a prompt has in common
with an entry is found on the tokens themselves. Entries leave in the order of their last use when they take more bytes
than they may. Rows are copied in and out as they are: the models read what they would have written themselves. Of a
ring (layers with a sliding window) there are only the newest rows: its text helps prompts that leave it near its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsc.bundle_schema.kv_plan import Owner
from dsc.runtime.kv_arena import KvZone
from dsc.runtime.kv_transfer import copy_positions, first_common

LEAST_ROWS = 16  # fewer are read about as fast as they are copied

Zones = Mapping[Owner, KvZone]


@dataclass(frozen=True)
class SavedText:
    """A text that was read.

    Attributes:
        tokens: int32 [n].
        rows: model -> graph input name -> [Hkv, m, D]; of m positions, or of a ring all its rows.
        lengths: model -> positions: n for the target, and what the draft had read of it.
        least: model -> the shortest length that can be put back.
    """

    tokens: NDArray[np.int32]
    rows: dict[Owner, dict[str, NDArray[np.generic]]]
    lengths: dict[Owner, int]
    least: dict[Owner, int]

    @property
    def nbytes(self) -> int:
        """Of tokens and rows."""
        return self.tokens.nbytes + sum(rows.nbytes for pools in self.rows.values() for rows in pools.values())

    def serves(self, owner: Owner, n_rows: int) -> bool:
        """Whether the first `n_rows` can be put back."""
        return n_rows >= self.least[owner]


@dataclass
class PrefixCounts:
    """What was asked of the cache since it was made.

    Attributes:
        hits: prompts that a saved text helped; `restored_rows` of the target were copied for them.
        lost: times that rings had written over what a prompt needed of a known text.
        too_large: texts that were not saved because they alone would take more than all entries may.
    """

    lookups: int = 0
    hits: int = 0
    restored_rows: int = 0
    saved: int = 0
    lost: int = 0
    too_large: int = 0
    evictions: int = 0


class PrefixCache:
    """Texts with their rows, least recently used first to go.

    Args:
        max_nbytes: of all entries together.
    """

    def __init__(self, max_nbytes: int) -> None:
        self.counts = PrefixCounts()
        self.nbytes = 0
        self._texts: list[SavedText] = []  # least recently used first
        self.configure(max_nbytes)

    def __len__(self) -> int:
        return len(self._texts)

    def configure(self, max_nbytes: int) -> None:
        """Take a new bound."""
        self._max_nbytes = max_nbytes
        self._evict()

    def clear(self) -> None:
        """Forget every text."""
        self._texts.clear()
        self.nbytes = 0

    def swap_in(self, live: Sequence[int], prompt: Sequence[int], zones: Zones, rewind: Callable[[int], None]) -> int:
        """Leave in the zones what they or a saved text hold of `prompt` without its last token.

        A text that has to leave for it is saved first.

        Args:
            live: the text that the zones have read, or more.
            rewind: leaves the first tokens of `live` in the zones, as many as it is told.

        Returns:
            How many tokens came from a saved text; 0 when what was there was as good.
        """
        target = zones["target"]
        wanted = np.asarray(prompt[:-1], np.int32)
        common = common_length(np.asarray(live[: target.length], np.int32), wanted)
        kept = common if target.keeps(common) else 0
        found = self.find(wanted, kept + LEAST_ROWS)
        if target.length - kept >= LEAST_ROWS:
            self.save(live, zones)
        emptied = sum(zone.emptied for zone in zones.values())
        rewind(common)
        if found is not None:
            return self.restore(*found, zones)
        self.counts.lost += sum(zone.emptied for zone in zones.values()) - emptied
        return 0

    def find(self, ids: NDArray[np.int32], at_least: int) -> tuple[SavedText, int] | None:
        """The text that serves most leading tokens of `ids`, and how many; None below `at_least`."""
        self.counts.lookups += 1
        at_least = max(at_least, LEAST_ROWS)
        known = [(common, text) for text in self._texts if (common := common_length(text.tokens, ids)) >= at_least]
        usable = [(common, text) for common, text in known if text.serves("target", common)]
        self.counts.lost += bool(known) and not usable
        if not usable:
            return None
        common, text = max(usable, key=_length)
        self.counts.hits += 1
        self._touch(text)
        return text, common

    def restore(self, text: SavedText, n_tokens: int, zones: Zones) -> int:
        """Put the rows of the first `n_tokens` back, of the draft as many as it had read; returns the target's."""
        for owner, zone in zones.items():
            n_rows = min(n_tokens, zone.capacity, text.lengths[owner])
            if n_rows <= zone.length:
                continue
            if not text.serves(owner, n_rows):
                self.counts.lost += 1
                continue
            for name, rows in text.rows[owner].items():
                place = zone.pools[name][0]
                copy_positions(rows, place, first_common(rows, place, n_rows), n_rows)
            zone.refill(n_rows, text.least[owner])
        self.counts.restored_rows += zones["target"].length
        return zones["target"].length

    def save(self, tokens: Sequence[int], zones: Zones) -> None:
        """Keep a text that the zones hold, unless a longer one that begins with it is kept already."""
        n_tokens = zones["target"].length
        text = np.asarray(tokens[:n_tokens], np.int32)
        if n_tokens < LEAST_ROWS or self._max_nbytes == 0:
            return
        for known in self._texts[::-1]:
            common = common_length(known.tokens, text)
            if common == n_tokens and known.serves("target", common):
                self._touch(known)
                return
            if common == len(known.tokens) and zones["target"].keeps(common):
                self._drop(known)
        self._add(text, zones)

    def _add(self, text: NDArray[np.int32], zones: Zones) -> None:
        if sum(_nbytes(zone) for zone in zones.values()) + text.nbytes > self._max_nbytes:
            self.counts.too_large += 1
            return
        rows = {
            owner: {name: pool[0, :, : zone.length].copy() for name, pool in zone.pools.items()}
            for owner, zone in zones.items()
        }
        lengths = {owner: zone.length for owner, zone in zones.items()}
        least = {owner: zone.least for owner, zone in zones.items()}
        self._texts.append(SavedText(text, rows, lengths, least))
        self.nbytes += self._texts[-1].nbytes
        self.counts.saved += 1
        self._evict()

    def _evict(self) -> None:
        while self.nbytes > self._max_nbytes:
            self._drop(self._texts[0])
            self.counts.evictions += 1

    def _drop(self, text: SavedText) -> None:
        self._texts = [other for other in self._texts if other is not text]
        self.nbytes -= text.nbytes

    def _touch(self, text: SavedText) -> None:
        self._texts = [*(other for other in self._texts if other is not text), text]


def common_length(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many leading elements are equal."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if differ.size else length


def _length(found: tuple[int, SavedText]) -> int:
    return found[0]


def _nbytes(zone: KvZone) -> int:
    """Of a copy of the valid rows."""
    return sum(pool[0, :, : zone.length].nbytes for pool in zone.pools.values())
