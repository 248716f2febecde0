"""What is done to a pool of sequences between two rounds: holes closed, memory given back or touched, the size changed.

Each repair does at least one step when there is anything to do, goes on while there is time, and says whether it is
complete. A sequence is moved piece by piece and goes on being used where it is until its last row has been copied, so a
repair may stop anywhere and loses nothing. None may be called while a forward runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dsc.bundle_schema.kv_layout import resized, ring_of, round_up
from dsc.runtime.kv_arena import KvArena
from dsc.runtime.kv_slots import KvSlots
from dsc.runtime.kv_transfer import KvTransfer

HasTime = Callable[[], bool]


def no_limit() -> bool:
    """A budget that never ends."""
    return True


@dataclass
class RepairCounts:
    """What was done since the pool was made.

    Attributes:
        moved: sequences that changed their slot.
        abandoned: moves given up because the slot was taken, or the sequence ended, before they were complete.
        trimmed_rows: rows whose memory went back to the system.
        extended_rows: rows whose memory was touched ahead of use.
        resized: changes of the arena's size that were completed.
    """

    moved: int = 0
    abandoned: int = 0
    trimmed_rows: int = 0
    extended_rows: int = 0
    resized: int = 0


@dataclass(frozen=True)
class _Move:
    sequence: int
    slot: int
    tenancies: int  # of the slot, when the move began
    transfer: KvTransfer


class KvRepairs:
    """The repairs of one pool."""

    def __init__(self, pool: KvSlots) -> None:
        self.counts = RepairCounts()
        self._pool = pool
        self._bundle_plan = pool.arena.plan
        self._move: _Move | None = None
        self._wanted: int | None = None  # the maximum length after a resize
        self._new_arena: KvArena | None = None
        self._leaving: dict[int, KvTransfer] = {}

    def defragment(self, has_time: HasTime = no_limit) -> bool:
        """Close holes by moving the last sequence into the first free slot; not while a resize copies."""
        pool = self._pool
        if self._new_arena is not None:
            return False
        self._abandon_stale_move()
        while self._move is not None or pool.span > pool.n_live:
            move = self._move = self._move or self._begin_move()
            complete = move.transfer.step(has_time)
            for owner, zone in pool.live[move.sequence].zones.items():
                pool.reach[owner][move.slot] = max(pool.reach[owner][move.slot], zone.length)
            if not complete or pool.live[move.sequence].waits:
                return False
            self._finish_move(move)
            if not has_time():
                break
        return pool.span == pool.n_live

    def _begin_move(self) -> _Move:
        pool = self._pool
        slot, sequence = pool.at.index(None), pool.at[pool.span - 1]
        assert sequence is not None
        places = {owner: pool.arena.pools_of(owner, slot) for owner in pool.owners}
        transfer = KvTransfer(pool.live[sequence].zones, places, pool.arena.secure_rollback)
        return _Move(sequence, slot, pool.tenancies[slot], transfer)

    def _finish_move(self, move: _Move) -> None:
        pool, entry = self._pool, self._pool.live[move.sequence]
        for owner, zone in entry.zones.items():
            pool.reach[owner][entry.slot] = zone.reach
            zone.move_to(move.transfer.places[owner], pool.reach[owner][move.slot], zone.ring)
        pool.at[entry.slot], pool.at[move.slot] = None, move.sequence
        pool.tenancies[move.slot] += 1
        entry.slot = move.slot
        self._move = None
        self.counts.moved += 1

    def _abandon_stale_move(self) -> None:
        """Give a move up whose sequence has ended, or whose slot has been used since."""
        move, pool = self._move, self._pool
        if move is not None and (move.sequence not in pool.live or pool.tenancies[move.slot] != move.tenancies):
            self._abandon_move()

    def _abandon_move(self) -> None:
        move = self._move
        if move is None:
            return
        if self._pool.tenancies[move.slot] == move.tenancies:
            move.transfer.undo()
        self._move = None
        self.counts.abandoned += 1

    def trim(self, has_time: HasTime = no_limit) -> bool:
        """Give back the memory of rows that were written and are not valid, free slots' included."""
        pool, counts = self._pool, self.counts
        for entry in pool.live.values():
            for owner, zone in entry.zones.items():
                # Rejected drafts will be written over, and a forward may be about to.
                if zone.reach - zone.length <= pool.arena.plan.rollback_slack or entry.waits:
                    continue
                pool.arena.release(owner, entry.slot, zone.length)
                counts.trimmed_rows += zone.reach - zone.length
                zone.reach = zone.length
                if not has_time():
                    return False
        taken = {self._move.slot} if self._move is not None else set()
        for owner, reach in pool.reach.items():
            for slot in (index for index, rows in enumerate(reach) if rows and pool.at[index] is None):
                if slot in taken:
                    continue
                pool.arena.release(owner, slot, 0)
                counts.trimmed_rows += reach[slot]
                reach[slot] = 0
                if not has_time():
                    return False
        return True

    def extend(self, min_density: float, has_time: HasTime = no_limit) -> bool:
        """Touch the memory of each sequence's next rows in all layers, so that no forward waits for it.

        Args:
            min_density: valid over reserved rows that must be left in each model.
        """
        plan = self._pool.arena.plan
        for entry in self._pool.live.values():
            for owner, zone in entry.zones.items():
                end = min(round_up(zone.length + plan.rollback_slack, plan.block[0]), entry.max_length)
                if zone.reach >= end or zone.length < min_density * end or entry.waits:
                    continue
                self._pool.arena.touch(owner, entry.slot, zone.reach, end)
                self.counts.extended_rows += end - zone.reach
                zone.reach = end
                if not has_time():
                    return False
        return True

    def resize(self, max_length: int) -> None:
        """Ask for another maximum length; `continue_resize` brings it about, and no live sequence is cut.

        A smaller one holds for new sequences at once, a larger one when its memory is there. The arena is replaced when
        every sequence that was promised more than `max_length` has ended: see `resize_waits_for`.

        Raises:
            PlanError: it is not from 1 to what the bundle was compiled for.
        """
        self.check_length(max_length)
        self._wanted, self._new_arena = max_length, None
        self._leaving.clear()
        self._pool.max_length = min(max_length, self._pool.max_length)

    def check_length(self, max_length: int) -> None:
        """Whether `resize` would take this length.

        Raises:
            PlanError: it is not from 1 to what the bundle was compiled for.
        """
        resized(self._bundle_plan, max_length, self._pool.n_slots)

    @property
    def resize_waits_for(self) -> tuple[int, ...]:
        """The live sequences that were promised more rows than the arena is to have."""
        wanted, live = self._wanted, self._pool.live
        return tuple(name for name, entry in live.items() if wanted is not None and entry.max_length > wanted)

    def continue_resize(self, has_time: HasTime = no_limit) -> bool:
        """Copy towards the new arena; says whether it is in force, or none was asked for."""
        pool = self._pool
        if self._wanted is None:
            return True
        if self.resize_waits_for:
            return False
        if self._new_arena is None:
            self._abandon_move()
            plan = resized(self._bundle_plan, self._wanted, pool.n_slots)
            self._new_arena = KvArena(plan, pool.arena.secure_rollback)
        for name in self._leaving.keys() - pool.live.keys():
            self._leaving.pop(name).undo()
        for name, entry in pool.live.items():
            transfer = self._leaving.get(name)
            if transfer is None:
                places = {owner: self._new_arena.pools_of(owner, entry.slot) for owner in pool.owners}
                transfer = self._leaving[name] = KvTransfer(entry.zones, places, pool.arena.secure_rollback)
            if not transfer.step(has_time) or entry.waits:
                return False
        self._enforce(self._new_arena, self._wanted)
        return True

    def _enforce(self, arena: KvArena, max_length: int) -> None:
        """The new arena holds all that is valid: use it."""
        pool = self._pool
        for name, entry in pool.live.items():
            for owner, zone in entry.zones.items():
                zone.move_to(self._leaving[name].places[owner], zone.length, ring_of(arena.plan, owner))
        pool.take(arena)
        pool.max_length = max_length
        self._leaving.clear()
        self._wanted = self._new_arena = None
        self.counts.resized += 1
