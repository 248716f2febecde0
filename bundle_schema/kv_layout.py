"""Where things lie in a KV arena: sizes and order in, byte offsets out. Pure, no I/O.

The compiler's planner lays out a new plan with it; the runtime lays a bundle's plan out again for another length or
another number of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from dsc.bundle_schema.errors import PlanError
from dsc.bundle_schema.kv_plan import PAGE, SLOT_ALIGNMENT, KvPlan, KvSlot, Owner, SlotRef, Zone

TILE_ROWS: Final = 128
MAX_SLOTS: Final = 256
GUARD_NBYTES: Final = PAGE


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def rows_for(max_length: int, rollback_slack: int) -> int:
    """Rows of a layer that keeps all of them: whole tiles, so that a rejected block never reaches live rows."""
    return round_up(max_length + rollback_slack, TILE_ROWS)


def ring_rows_for(window: int, rollback_slack: int) -> int:
    """Rows of a layer that keeps a window: whole tiles, with room for a round or for a tile of a prompt."""
    return round_up(window + max(rollback_slack, TILE_ROWS), TILE_ROWS)


def layer_rows(window: int | None, max_length: int, rollback_slack: int) -> tuple[int, int | None]:
    """Rows of a layer, and the window if they are a ring: only where that takes fewer.

    Args:
        window: of a layer that may be a ring; None keeps all rows.
    """
    rows = rows_for(max_length, rollback_slack)
    if window is None or (ring_rows := ring_rows_for(window, rollback_slack)) >= rows:
        return rows, None
    return ring_rows, window


@dataclass(frozen=True)
class Ring:
    """What the rings of a model can do.

    Attributes:
        rows: of the smallest ring.
        room: most rows of one forward, and most that a sequence can be wound back once rings are full.
    """

    rows: int
    room: int

    def least(self, written: int) -> int:
        """The shortest length whose window is still there after positions up to `written`, 0 when every length's is."""
        return max(written - self.room, 0) if written > self.rows else 0


def ring_of(plan: KvPlan, owner: Owner) -> Ring | None:
    """The rings of a model; None when all its layers keep all rows."""
    rings = [(slot.rows, slot.rows - slot.window) for slot in plan.slots if slot.owner == owner and slot.window]
    return Ring(min(rows for rows, _ in rings), min(room for _, room in rings)) if rings else None


def draft_shares(plan: KvPlan) -> bool:
    """Whether the draft's keys and values are the target's, layer for layer.

    Raises:
        PlanError: only some are, or a layer's are those of another layer; no draft could continue such a cache.
    """
    drafts = [slot for slot in plan.slots if slot.owner == "draft"]
    if all(slot.shared_with is None for slot in drafts):
        return False
    for slot in drafts:
        if slot.shared_with != SlotRef(owner="target", layer=slot.layer, role=slot.role):
            where = f"draft layer {slot.layer} {slot.role}"
            raise PlanError(where, f"all layers of a draft, or none, share those of the target, got {slot.shared_with}")
    return True


def without_rings(plan: KvPlan) -> KvPlan:
    """The same plan with all rows in every layer, for graphs that keep position p in row p."""
    if all(slot.window is None for slot in plan.slots):
        return plan
    slots = [slot.model_copy(update={"window": None}) for slot in plan.slots]
    return resized(plan.model_copy(update={"slots": tuple(slots)}), plan.max_length, plan.n_slots)


def lay_out(slots: Sequence[KvSlot], max_length: int, rollback_slack: int) -> KvPlan:
    """Give slots their place: a zone a model, on a page and followed by a guard, in the order in which models appear.

    Args:
        slots: at least one, all for the same number of sequences; their offsets are ignored, and so are the sizes of
            those that share the memory of another.
    """
    placed: dict[tuple[str, int, str], KvSlot] = {}
    zones: list[Zone] = []
    offset = 0
    for owner in dict.fromkeys(slot.owner for slot in slots if slot.shared_with is None):
        start = offset
        for slot in slots:
            if slot.owner != owner or slot.shared_with is not None:
                continue
            offset = round_up(offset, SLOT_ALIGNMENT)
            nbytes = prod(slot.shape) * slot.dtype.itemsize
            placed[slot.owner, slot.layer, slot.role] = slot.model_copy(update={"offset": offset, "nbytes": nbytes})
            offset += nbytes
        zones.append(_zone(owner, start, offset))
        offset = round_up(zones[-1].guard_offset + GUARD_NBYTES, PAGE)
    return KvPlan(
        max_length=max_length,
        n_slots=slots[0].shape[0],
        rollback_slack=rollback_slack,
        zones=tuple(zones),
        slots=tuple(_settled(slot, placed) for slot in slots),
        total_nbytes=offset,
    )


def resized(plan: KvPlan, max_length: int, n_slots: int) -> KvPlan:
    """The same layers for sequences of another length, or for another number of them; rings where they take fewer rows.

    Raises:
        PlanError: `max_length` is beyond what the plan's graphs were made for, or it or `n_slots` is out of range.
    """
    if not 1 <= max_length <= plan.max_length:
        raise PlanError("max_length", f"1 to {plan.max_length} are possible in this bundle, got {max_length}")
    if not 1 <= n_slots <= MAX_SLOTS:
        raise PlanError("slots", f"1 to {MAX_SLOTS} are possible, got {n_slots}")
    if not plan.slots:
        return plan.model_copy(update={"max_length": max_length, "n_slots": n_slots})
    slots = []
    for slot in plan.slots:
        _, n_kv_heads, _, head_dim = slot.shape
        rows, window = layer_rows(slot.window, max_length, plan.rollback_slack)
        slots.append(slot.model_copy(update={"shape": (n_slots, n_kv_heads, rows, head_dim), "window": window}))
    return lay_out(slots, max_length, plan.rollback_slack)


def _zone(owner: Owner, start: int, end: int) -> Zone:
    guard = round_up(end, SLOT_ALIGNMENT)
    return Zone(name=owner, offset=start, nbytes=end - start, guard_offset=guard, guard_nbytes=GUARD_NBYTES)


def _settled(slot: KvSlot, placed: dict[tuple[str, int, str], KvSlot]) -> KvSlot:
    """The slot in its place, or in that of the slot whose memory it uses."""
    if slot.shared_with is None:
        return placed[slot.owner, slot.layer, slot.role]
    memory = placed[slot.shared_with.owner, slot.shared_with.layer, slot.shared_with.role]
    return slot.model_copy(update={"shape": memory.shape, "offset": memory.offset, "nbytes": memory.nbytes})
