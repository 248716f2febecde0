"""The target's part of a round with several sequences: all rows in one run, or one run a sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsc.bundle_schema.dflash_config import MAX_WINDOW
from dsc.bundle_schema.errors import DscError
from dsc.bundle_schema.kv_plan import Owner
from dsc.runtime.kv_slots import KvSlots
from dsc.runtime.session import ForwardSession, Rows

Logits = NDArray[np.float32]
MAX_ROWS = MAX_WINDOW + 1


@dataclass(frozen=True)
class Turn:
    """What one sequence reads in a round: `tokens` after its valid rows, and how many of the last want logits."""

    sequence: int
    tokens: Sequence[int]
    n_logits: int


@dataclass(frozen=True)
class _Pools:
    pools: dict[str, NDArray[np.generic]]


class SlotForward:
    """The forward of one sequence alone, wherever it lies; see `dsc.runtime.cached_model.Forward`."""

    def __init__(self, graph: SlotGraph, sequence: int) -> None:
        self.chunk = graph.chunk
        self._graph = graph
        self._sequence = sequence

    def forward(self, tokens: Sequence[int], past: int, n_logits: int) -> Logits:
        """Logits [n_logits, V] of the last of `tokens`."""
        return self._graph.session(self._sequence).forward(tokens, past, n_logits)


class SlotGraph:
    """One model's graph over the slots of a pool.

    Args:
        graph: bound to other memory; its weights are shared.
        pool: where sequences lie.
        owner: whose graph it is.
    """

    def __init__(self, graph: ForwardSession, pool: KvSlots, owner: Owner) -> None:
        self.chunk = graph.chunk
        self._graph = graph
        self._pool = pool
        self._owner: Owner = owner
        self._epoch = -1
        self._sessions: dict[int, ForwardSession] = {}
        self._packed: ForwardSession | None = None

    def session(self, sequence: int) -> ForwardSession:
        """A session over the slot in which `sequence` lies now."""
        self._follow()
        slot = self._pool.slot(sequence)
        if slot not in self._sessions:
            pools = self._pool.arena.pools_of(self._owner, slot)
            self._sessions[slot] = self._over(pools, MAX_ROWS, self.chunk)
        return self._sessions[slot]

    def packed(self) -> ForwardSession:
        """A session over all slots."""
        self._follow()
        if self._packed is None:
            # Those that decode bring their rows beside a whole chunk of prompts.
            most = MAX_ROWS * self._pool.n_slots
            self._packed = self._over(self._pool.arena.pools(self._owner), most, self.chunk + most)
        return self._packed

    def _over(self, pools: Mapping[str, NDArray[np.generic]], max_rows: int, chunk: int) -> ForwardSession:
        return self._graph.over(_Pools(dict(pools)), max_rows, chunk)

    def _follow(self) -> None:
        """Sessions are bound to addresses: another arena needs other sessions."""
        if self._epoch != self._pool.epoch:
            self._epoch, self._packed = self._pool.epoch, None
            self._sessions.clear()


class TargetForward:
    """The target's forward of a round.

    Args:
        reason: why sequences cannot share a run; empty when they can.

    Attributes:
        runs: forwards so far.
        split: rounds whose shared run failed, so that each sequence ran alone.
    """

    def __init__(self, graph: SlotGraph, pool: KvSlots, reason: str = "") -> None:
        self.reason = reason
        self.runs = 0
        self.split = 0
        self._graph = graph
        self._pool = pool

    def run(self, turns: Sequence[Turn]) -> list[Logits | DscError]:
        """Logits [n_logits, V] of each turn, views that the next call overwrites, or the error that it met.

        Whatever fails for all is tried again one by one: an error then is its sequence's own.
        """
        if len(turns) > 1 and not self.reason:
            try:
                return [*self._together(turns)]
            except DscError:
                self.split += 1
        return [self._alone(turn) for turn in turns]

    def _together(self, turns: Sequence[Turn]) -> list[Logits]:
        pool = self._pool
        rows = [Rows(pool.slot(turn.sequence), turn.tokens, self._past(turn), turn.n_logits) for turn in turns]
        order = sorted(range(len(rows)), key=lambda index: rows[index].slot)
        self.runs += 1
        found = self._graph.packed().forward_packed([rows[index] for index in order])
        by_turn = dict(zip(order, found, strict=True))
        return [by_turn[index] for index in range(len(rows))]

    def _alone(self, turn: Turn) -> Logits | DscError:
        session = self._graph.session(turn.sequence)
        self.runs += 1
        try:
            logits = session.forward(turn.tokens, self._past(turn), max(turn.n_logits, 1))
        except DscError as error:
            return error
        return logits[len(logits) - turn.n_logits :]

    def _past(self, turn: Turn) -> int:
        """Valid rows of a sequence that is about to read its turn."""
        zone = self._pool.zone(turn.sequence, "target")
        zone.expect(len(turn.tokens))
        return zone.length


def why_apart(graph: ForwardSession, kernels: str) -> str:
    """Why sequences cannot share a run of this graph; empty when they can."""
    if graph.packs_rows:
        return ""
    if kernels != "native":
        return "one forward a sequence: only the native kernels take rows of several sequences"
    return "one forward a sequence: the bundle is older than packed rows; compile it again"
