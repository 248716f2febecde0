"""The slots of a KV arena: which sequence lies where, and which of its rows hold.

A live sequence has one slot in every pool of target and draft. A forward's rows are appended first, and accepted as far
as their tokens held. `dsc.runtime.kv_repairs` moves sequences and replaces the arena between two rounds; a sequence's
zones stay the same objects, wherever it lies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

from dsc.bundle_schema.errors import PlanError
from dsc.bundle_schema.kv_plan import Owner
from dsc.runtime.kv_arena import KvArena, KvZone


@dataclass
class SlotCounts:
    """What became of the pool's sequences since it was made; `refused` ones found no free slot."""

    allocated: int = 0
    refused: int = 0
    freed: int = 0


@dataclass
class LiveSequence:
    """One sequence in the pool.

    Attributes:
        slot: where it lies now.
        max_length: most valid rows that it was promised.
        zones: its rows in each model.
        pending: rows of each model that were appended and wait for their verdict.
    """

    slot: int
    max_length: int
    zones: dict[Owner, KvZone]
    pending: dict[Owner, int] = field(default_factory=dict)

    @property
    def waits(self) -> bool:
        """Rows wait for their verdict."""
        return any(self.pending.values())


class KvSlots:
    """The live sequences of an arena; sequences are named by numbers that are never used again.

    Args:
        arena: as planned for the wanted number of slots.
        max_length: most tokens of a sequence that is allocated from now on; the plan's own when None.

    Attributes:
        arena: in force. `epoch` rises when another replaces it; addresses in the old one are void then.
        live: sequence -> what is known of it, oldest first.
        owners: models with rows of their own; a draft may share the target's.
        at: slot -> who lies there, or None.
        tenancies: slot -> how many sequences have been put there.
        reach: model -> slot -> rows of a free slot that still hold memory.
    """

    def __init__(self, arena: KvArena, max_length: int | None = None) -> None:
        self.max_length = arena.plan.max_length if max_length is None else max_length
        own = [slot.owner for slot in arena.plan.slots if slot.shared_with is None]
        self.owners: tuple[Owner, ...] = tuple(dict.fromkeys(own))
        self.counts = SlotCounts()
        self.live: dict[int, LiveSequence] = {}
        self.at: list[int | None] = [None] * arena.plan.n_slots
        self.tenancies = [0] * arena.plan.n_slots
        self.epoch = -1
        self.take(arena)

    def take(self, arena: KvArena) -> None:
        """Use this arena; what is valid has been copied there."""
        self.arena = arena
        self.reach: dict[Owner, list[int]] = {owner: [0] * self.n_slots for owner in self.owners}
        self.epoch += 1

    @property
    def n_slots(self) -> int:
        """Sequences that may live at once."""
        return len(self.at)

    @property
    def n_live(self) -> int:
        """Sequences that live."""
        return len(self.live)

    @property
    def span(self) -> int:
        """All live sequences lie in slots 0 .. span - 1; it is `n_live` when there are no holes."""
        return max((entry.slot for entry in self.live.values()), default=-1) + 1

    @property
    def longest_hole(self) -> int:
        """Most free slots in a row below the last live one."""
        runs = (len(list(run)) for free, run in groupby(self.at[: self.span], lambda name: name is None) if free)
        return max(runs, default=0)

    @property
    def valid_rows(self) -> int:
        """Rows of live sequences that hold, in all models."""
        return sum(zone.length for entry in self.live.values() for zone in entry.zones.values())

    @property
    def reserved_rows(self) -> int:
        """Rows of live sequences that hold memory: written since it was last given back, or touched ahead of use."""
        return sum(zone.reach for entry in self.live.values() for zone in entry.zones.values())

    def allocate(self, max_length: int | None = None) -> int | None:
        """A new, empty sequence in the lowest free slot; None when no slot is free.

        Args:
            max_length: most rows that it may have; `self.max_length` at most, and by default.
        """
        slot = next((index for index, name in enumerate(self.at) if name is None), None)
        if slot is None:
            self.counts.refused += 1
            return None
        limit = self.max_length if max_length is None else min(max_length, self.max_length)
        zones = {owner: self.arena.zone(owner, limit, slot) for owner in self.owners}
        for owner, zone in zones.items():
            zone.reach = self.reach[owner][slot]
            zone.wipe()
        self.counts.allocated += 1
        name = self.counts.allocated
        self.live[name] = LiveSequence(slot, limit, zones)
        self.at[slot] = name
        self.tenancies[slot] += 1
        return name

    def free(self, sequence: int) -> None:
        """End a sequence, whatever state it is in; its slot is a hole until it is taken or closed."""
        for owner in self.owners:
            self.rewind(sequence, owner, 0)
        ended = self.live.pop(sequence)
        for owner, zone in ended.zones.items():
            self.reach[owner][ended.slot] = zone.reach
        self.at[ended.slot] = None
        self.counts.freed += 1

    def slot(self, sequence: int) -> int:
        """Where it lies now; a repair between two rounds may have moved it."""
        return self._get(sequence).slot

    def zone(self, sequence: int, owner: Owner) -> KvZone:
        """Its rows in one model; the same object as long as the sequence lives."""
        return self._get(sequence).zones[owner]

    def layer_lengths(self, sequence: int) -> list[int]:
        """Its valid rows in each layer: the target's layers, then the draft's."""
        return [zone.length for zone in self._get(sequence).zones.values() for name in zone.pools if name[0] == "k"]

    def append(self, sequence: int, owner: Owner, n_rows: int) -> int:
        """Announce rows that the next forward writes past the valid ones; returns the first.

        Raises:
            PlanError: they would reach past the sequence's rows and the plan's slack, or rows wait for their verdict.
        """
        entry = self._get(sequence)
        where = f"{owner} rows of sequence {sequence}"
        zone = entry.zones[owner]
        start = zone.length
        room = entry.max_length + self.arena.plan.rollback_slack - start
        if entry.pending.get(owner):
            raise PlanError(where, "must be accepted or rejected before more are added")
        if not 1 <= n_rows <= room:
            raise PlanError(where, f"1 to {room} rows fit after {start}, got {n_rows}")
        zone.expect(n_rows)
        entry.pending[owner] = n_rows
        return start

    def accept(self, sequence: int, owner: Owner, kept: int) -> None:
        """Of the appended rows the first `kept` hold, the others are rejected: O(1) but for secure rollback.

        Raises:
            PlanError: fewer were appended, or the sequence would be longer than it may be.
        """
        entry = self._get(sequence)
        entry.zones[owner].commit(entry.pending.get(owner, 0), kept)
        entry.pending[owner] = 0

    def rewind(self, sequence: int, owner: Owner, length: int) -> None:
        """Make at most the first `length` rows valid; appended ones are rejected."""
        self.accept(sequence, owner, 0)
        self.zone(sequence, owner).rewind(length)

    def _get(self, sequence: int) -> LiveSequence:
        entry = self.live.get(sequence)
        if entry is None:
            raise PlanError(f"sequence {sequence}", "is required to live, it has ended or never began")
        return entry
