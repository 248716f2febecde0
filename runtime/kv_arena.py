"""One allocation for all keys and values, cut by the bundle's KV plan.

Rows are written once, by the forward that made them. Accepting rows moves a length forward, rejecting them does not: a
rejected row stays where it is until the next forward writes over it, and no forward reads past the length.
"""

from __future__ import annotations

import mmap
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dsc.bundle_schema.errors import HostError, PlanError
from dsc.bundle_schema.kv_layout import Ring, ring_of
from dsc.bundle_schema.kv_plan import KvPlan, KvSlot, Owner
from dsc.bundle_schema.tensors import DType

_GUARD_BYTE = 0xA5
_JOURNAL_ENTRIES = 256
_NUMPY = {
    DType.FLOAT32: np.float32,
    DType.FLOAT16: np.float16,
    DType.INT8: np.int8,
    DType.UINT8: np.uint8,
}


@dataclass(frozen=True)
class Rejected:
    """Rows [start, end) that were written and are not valid."""

    start: int
    end: int


class KvZone:
    """The keys and values of one model and one sequence: how many rows are valid, and where they are.

    Args:
        owner: whose zone this is.
        pools: graph input name -> array [1, Hkv, rows, D] in the arena.
        capacity: most valid rows.
        ring: of the layers that keep a window only; None when every layer keeps all its rows.
        secure_rollback: overwrite rejected rows with zeros.

    Attributes:
        journals: rejected rows are noted in the journal.
        reach: rows from the start that were ever written, valid or not, since the memory behind them was given back.
        settled: leading valid rows that no rewind has touched since this was last set.
        least: the shortest length but 0 that can be made valid: rings have written over what shorter ones need.
        emptied: rewinds to shorter lengths.
    """

    def __init__(
        self,
        owner: Owner,
        pools: dict[str, NDArray[np.generic]],
        capacity: int,
        ring: Ring | None = None,
        secure_rollback: bool = False,
    ) -> None:
        self.owner = owner
        self.pools = pools
        self.capacity = capacity
        self.length = 0
        self.journals = True
        self.reach = 0
        self.settled = 0
        self.journal: deque[Rejected] = deque(maxlen=_JOURNAL_ENTRIES)
        self.ring = ring
        self.least = 0
        self.emptied = 0
        self._secure = secure_rollback

    @property
    def unsavable(self) -> str:
        """Why its rows cannot be copied out for later use; empty when they can."""
        if not self.pools:
            return "the rows are on the device"
        return "secure rollback keeps no copies" if self._secure else ""

    def keeps(self, length: int) -> bool:
        """Whether the first `length` rows could be made the valid ones: a ring may have lost what they need."""
        return length == 0 or length >= self.least

    def expect(self, n_rows: int) -> None:
        """A forward is about to write this many rows past the length, whatever becomes of it.

        Raises:
            PlanError: a ring has not the room.
        """
        if self.ring is not None and n_rows > self.ring.room:
            raise PlanError(f"{self.owner} zone", f"a ring takes {self.ring.room} rows at once, got {n_rows}")
        self._note_written(self.length + n_rows)

    def commit(self, written: int, kept: int) -> None:
        """Of `written` new rows past the length, keep the first `kept`; O(1) unless rollback is secure."""
        if not 0 <= kept <= written or self.length + kept > self.capacity:
            raise PlanError(
                f"{self.owner} zone",
                f"rows up to {self.capacity} fit, got {kept} of {written} after {self.length}",
            )
        start = self.length
        self.length = start + kept
        self.reach = max(self.reach, start + written)
        self._note_written(start + written)
        self._reject(self.length, start + written)

    def rewind(self, length: int) -> None:
        """Make `length` rows valid, at most as many as are now; O(1) unless rollback is secure.

        A ring that has already written over rows that `length` needs is emptied, so that they are computed again.
        """
        end = self.length
        if length >= end:
            return
        if not self.keeps(length):
            length = 0
            self.emptied += 1
        if length == 0:
            self.least = 0
        self.length = length
        self.settled = min(self.settled, length)
        self._reject(length, end)

    def refill(self, n_rows: int, least: int) -> None:
        """The first `n_rows` have been put back in place, from where `least` was the shortest length."""
        self.length = n_rows
        self.least = least
        self.settled = 0
        self.reach = max(self.reach, n_rows)

    def wipe(self) -> None:
        """Overwrite every row that was ever written with zeros, if rollback is secure."""
        if self._secure:
            for pool in self.pools.values():
                pool[:, :, : self.reach] = 0

    def move_to(self, pools: dict[str, NDArray[np.generic]], reach: int, ring: Ring | None) -> None:
        """Lie elsewhere from now on; what is valid has been copied there.

        Args:
            reach: rows of the new place that were ever written.
            ring: of the new place.
        """
        self.wipe()
        self.pools, self.reach, self.ring = pools, reach, ring
        self._note_written(self.length)

    def _note_written(self, end: int) -> None:
        """Rows up to `end` were or will be written, in a ring over older ones."""
        if self.ring is not None:
            self.least = max(self.least, self.ring.least(end))

    def _reject(self, start: int, end: int) -> None:
        if start == end:
            return
        if self.journals:
            self.journal.append(Rejected(start, end))
        if self._secure:
            for pool in self.pools.values():
                pool[:, :, np.arange(start, end) % pool.shape[2]] = 0


class KvArena:
    """The memory behind a `KvPlan`: page-aligned, allocated once, touched only where it is used.

    Args:
        plan: a checked plan.
        secure_rollback: zones overwrite rejected rows with zeros.

    Raises:
        HostError: the machine has not that much address space, or an element type is not known here.
    """

    def __init__(self, plan: KvPlan, secure_rollback: bool = False) -> None:
        self.plan = plan
        try:
            self._map = _anonymous(max(plan.total_nbytes, mmap.PAGESIZE))
        except (OSError, OverflowError) as error:
            raise HostError("arena", f"{plan.total_nbytes} bytes are required: {error}") from error
        self._memory = np.frombuffer(self._map, np.uint8)
        self.secure_rollback = secure_rollback
        for zone in plan.zones:
            self._guard(zone.guard_offset, zone.guard_nbytes)[:] = _GUARD_BYTE

    @property
    def nbytes(self) -> int:
        """Bytes of address space; only touched pages take memory."""
        return self._memory.nbytes

    def zone(self, owner: Owner, capacity: int, slot: int = 0) -> KvZone:
        """The zone of `owner` for the sequence in `slot`, empty, with room for `capacity` valid rows."""
        return KvZone(owner, self.pools_of(owner, slot), capacity, ring_of(self.plan, owner), self.secure_rollback)

    def pools(self, owner: Owner) -> dict[str, NDArray[np.generic]]:
        """Graph input name -> array [slots, Hkv, rows, D], for all sequences of a model."""
        slots = [item for item in self.plan.slots if item.owner == owner]
        return {f"{item.role}_pool.{item.layer}": self._view(item) for item in slots}

    def pools_of(self, owner: Owner, slot: int) -> dict[str, NDArray[np.generic]]:
        """Graph input name -> array [1, Hkv, rows, D] of the sequence in `slot`."""
        return {name: pool[slot : slot + 1] for name, pool in self.pools(owner).items()}

    def touch(self, owner: Owner, slot: int, start: int, end: int) -> None:
        """Make the system provide the memory of rows [start, end) that hold nothing; rings have theirs already."""
        for item in self.plan.slots:
            if item.owner == owner and item.window is None:
                self._view(item)[slot, :, start:end] = 0

    def release(self, owner: Owner, slot: int, start: int) -> None:
        """Give the memory of a slot's rows from `start` on back to the system; they read as zeros afterwards.

        Whole pages only, and nothing where the system cannot take back parts of a mapping. A ring gives all or nothing.
        """
        advice = getattr(mmap, "MADV_DONTNEED", None)
        if advice is None:
            return
        for item in self.plan.slots:
            if item.owner != owner or (item.window is not None and start):
                continue
            _, n_heads, rows, head_dim = item.shape
            row_nbytes = head_dim * item.dtype.itemsize
            for head in range(slot * n_heads, (slot + 1) * n_heads):
                first = item.offset + (head * rows + start) * row_nbytes
                first = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
                end = item.offset + (head + 1) * rows * row_nbytes
                end = end // mmap.PAGESIZE * mmap.PAGESIZE
                if first < end:
                    self._map.madvise(advice, first, end - first)

    def _view(self, slot: KvSlot) -> NDArray[np.generic]:
        dtype = _NUMPY.get(slot.dtype)
        if dtype is None:
            raise HostError(
                f"{slot.owner} layer {slot.layer} {slot.role}", f"{slot.dtype} pools are not known on the CPU"
            )
        return self._memory[slot.offset : slot.offset + slot.nbytes].view(dtype).reshape(slot.shape)

    def check_guards(self) -> None:
        """Look for writes past the end of a zone.

        Raises:
            PlanError: names the zone and the first byte that was overwritten.
        """
        for zone in self.plan.zones:
            hit = np.flatnonzero(self._guard(zone.guard_offset, zone.guard_nbytes) != _GUARD_BYTE)
            if hit.size:
                raise PlanError(
                    f"{zone.name} zone",
                    f"its guard was overwritten at byte {zone.guard_offset + int(hit[0])}",
                )

    def _guard(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        return self._memory[offset : offset + nbytes]


def _anonymous(nbytes: int) -> mmap.mmap:
    """Memory of this process alone: parts of it can be given back, and the system may use large pages."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes)
    return mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
