"""`kv_plan.json`: where every layer's keys and values lie in one arena; `kv_plan.cuda.json` is that of a GPU.

The planner (in the compiler) and the checker below are written apart from each other: the checker only
looks at the plan and at what the models need, and it runs at compile and at load.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import prod
from typing import Annotated, Final, Literal

from pydantic import FailFast, Field

from dsc.bundle_schema.errors import PlanError
from dsc.bundle_schema.model_info import ModelInfo
from dsc.bundle_schema.strict_json import dump_canonical, parse_strict
from dsc.bundle_schema.tensors import DType, StrictModel

KV_PLAN_NAME: Final = "kv_plan.json"
KV_PLAN_SCHEMA: Final = "1.0"
PAGE: Final = 4096
SLOT_ALIGNMENT: Final = 64

GraphBackend = Literal["cpu", "cuda"]
PLAN_NAMES: Final[dict[GraphBackend, str]] = {"cpu": KV_PLAN_NAME, "cuda": "kv_plan.cuda.json"}

Owner = Literal["target", "draft"]
Role = Literal["k", "v"]
Positive = Annotated[int, Field(ge=1, le=2**40)]
NBytes = Annotated[int, Field(ge=0, le=2**50)]
Index = Annotated[int, Field(ge=0, le=2**20)]


class SlotRef(StrictModel):
    """Names the slot whose memory another slot uses."""

    owner: Owner
    layer: Index
    role: Role


class KvSlot(StrictModel):
    """The memory of one layer's keys or values.

    Attributes:
        shape: ``[slots, Hkv, rows, D]``.
        offset: bytes from the arena's start.
        window: the layer's sliding window when its rows are a ring, None when they are linear.
        shared_with: the slot that owns the memory, when this layer's keys and values are that layer's.
    """

    owner: Owner
    layer: Index
    role: Role
    dtype: DType
    shape: tuple[Positive, Positive, Positive, Positive]
    offset: NBytes
    nbytes: NBytes
    window: Positive | None = None
    shared_with: SlotRef | None = None

    @property
    def rows(self) -> int:
        """KV rows a sequence has room for."""
        return self.shape[2]


class Zone(StrictModel):
    """A contiguous range of the arena for one model, and the guard area right behind it."""

    name: Owner
    offset: NBytes
    nbytes: NBytes
    guard_offset: NBytes
    guard_nbytes: Annotated[int, Field(ge=SLOT_ALIGNMENT, le=2**30)]


class KvPlan(StrictModel):
    """Byte offsets of all keys and values in one arena.

    Attributes:
        max_length: positions a sequence may have, prompt and output together, rollback slack not counted.
        n_slots: sequences that live in the arena at once.
        rollback_slack: rows that a rejected block may occupy past the last valid one, K + 1.
        block: the head-level tile (rows, head elements) that kernels read at once.
        alignment: every slot's offset is a multiple of it.
    """

    schema_version: Annotated[str, Field(pattern=r"^\d+\.\d+$")] = KV_PLAN_SCHEMA
    max_length: Positive
    n_slots: Annotated[int, Field(ge=1, le=2**16)]
    rollback_slack: Annotated[int, Field(ge=1, le=4096)]
    block: tuple[Positive, Positive] = (128, 128)
    alignment: Positive = SLOT_ALIGNMENT
    zones: Annotated[tuple[Zone, ...], FailFast()]
    slots: Annotated[tuple[KvSlot, ...], FailFast()]
    total_nbytes: NBytes

    def slot(self, owner: Owner, layer: int, role: Role) -> KvSlot:
        """The slot of a layer's keys or values.

        Raises:
            PlanError: the plan has none.
        """
        for slot in self.slots:
            if (slot.owner, slot.layer, slot.role) == (owner, layer, role):
                return slot
        raise PlanError(_label(owner, layer, role), "is not in the plan")


def parse_plan(data: bytes, where: str = KV_PLAN_NAME) -> KvPlan:
    """Read a plan; its consistency is `check_plan`'s business.

    Raises:
        PlanError: a field is missing, unknown, of the wrong type or out of range.
        BundleError: the JSON itself is malformed.
    """
    return parse_strict(KvPlan, data, where, KV_PLAN_SCHEMA, PlanError)


def dump_plan(plan: KvPlan) -> bytes:
    """The canonical bytes of a plan."""
    return dump_canonical(plan)


def check_plan(plan: KvPlan, target: ModelInfo, draft: ModelInfo | None = None) -> None:
    """Check a plan against what the models need, without knowing how it was made.

    Args:
        target: the target model.
        draft: the draft model when it keeps keys and values of its own, or shares the target's.

    Raises:
        PlanError: names the slot or zone that is wrong, what is required and what was got.
    """
    models: dict[str, ModelInfo] = {"target": target} | ({"draft": draft} if draft else {})
    _check_layers(plan, models)
    _check_zones(plan, models)
    for slot in plan.slots:
        _check_need(plan, slot, models[slot.owner])
        _check_place(plan, slot)
        if slot.shared_with is not None:
            _check_shared(plan, slot)
    _check_overlap([(slot.offset, slot.nbytes, _name(slot)) for slot in plan.slots if slot.shared_with is None])


def _label(owner: str, layer: int, role: str) -> str:
    return f"{owner} layer {layer} {role}"


def _name(slot: KvSlot | SlotRef) -> str:
    return _label(slot.owner, slot.layer, slot.role)


def _check_layers(plan: KvPlan, models: dict[str, ModelInfo]) -> None:
    """Every layer of every model has its keys and its values exactly once, and nothing else is there."""
    needed = {
        _label(owner, layer, role)
        for owner, info in models.items()
        for layer in range(len(info.kv_layers))
        for role in ("k", "v")
    }
    seen: set[str] = set()
    for slot in plan.slots:
        name = _name(slot)
        if name in seen:
            raise PlanError(name, "must be in the plan once, is there twice")
        if name not in needed:
            raise PlanError(name, "is in the plan but no model has such a layer")
        seen.add(name)
    if missing := sorted(needed - seen):
        raise PlanError(missing[0], "is required and missing")


def _check_zones(plan: KvPlan, models: dict[str, ModelInfo]) -> None:
    """Zones start on pages, each has its guard right behind it, and all lie inside the arena, disjoint."""
    names = [zone.name for zone in plan.zones]
    if len(set(names)) != len(names):
        raise PlanError("zones", f"each model has one zone, got {names}")
    if unknown := set(names) - set(models):
        raise PlanError("zones", f"no model named {', '.join(sorted(unknown))}")
    for zone in plan.zones:
        where = f"{zone.name} zone"
        if zone.offset % PAGE:
            raise PlanError(where, f"a multiple of {PAGE} is required as offset, got {zone.offset}")
        if zone.guard_offset < zone.offset + zone.nbytes:
            raise PlanError(
                where,
                f"its guard must start at {zone.offset + zone.nbytes} or later, got {zone.guard_offset}",
            )
    ranges = list(_zone_ranges(plan))
    _check_overlap(ranges)
    end = max((offset + nbytes for offset, nbytes, _ in ranges), default=0)
    if end > plan.total_nbytes:
        raise PlanError("arena", f"{end} bytes are required by its zones, got {plan.total_nbytes}")


def _zone_ranges(plan: KvPlan) -> Iterator[tuple[int, int, str]]:
    for zone in plan.zones:
        yield zone.offset, zone.nbytes, f"{zone.name} zone"
        yield zone.guard_offset, zone.guard_nbytes, f"{zone.name} guard"


def _check_need(plan: KvPlan, slot: KvSlot, info: ModelInfo) -> None:
    """The slot has the element type, the shape and the rows that its layer needs."""
    need = info.kv_layers[slot.layer]
    if slot.dtype != info.kv_dtype:
        raise PlanError(_name(slot), f"{info.kv_dtype} is required, got {slot.dtype}")
    n_slots, n_kv_heads, rows, head_dim = slot.shape
    required = (plan.n_slots, need.n_kv_heads, need.head_dim)
    if (n_slots, n_kv_heads, head_dim) != required:
        raise PlanError(_name(slot), f"slots, KV heads and head size {required} are required, got shape {slot.shape}")
    if slot.window is not None and not need.ring:
        raise PlanError(_name(slot), "must keep all rows: the graph of its layer has no rings")
    if slot.window is not None and slot.window != need.window:
        raise PlanError(_name(slot), f"a ring for window {need.window} is required, got {slot.window}")
    least = (plan.max_length if slot.window is None else slot.window) + plan.rollback_slack
    if rows < least:
        raise PlanError(_name(slot), f"at least {least} rows are required, got {rows}")
    if slot.window is not None and rows % plan.block[0]:
        raise PlanError(_name(slot), f"a ring of whole tiles of {plan.block[0]} rows is required, got {rows}")
    nbytes = prod(slot.shape) * slot.dtype.itemsize
    if slot.nbytes != nbytes:
        raise PlanError(_name(slot), f"{slot.shape} of {slot.dtype} takes {nbytes} bytes, got {slot.nbytes}")


def _check_place(plan: KvPlan, slot: KvSlot) -> None:
    """The slot is aligned and lies inside its owner's zone (a shared one in the zone of its memory)."""
    owner = slot.shared_with.owner if slot.shared_with else slot.owner
    zone = next((zone for zone in plan.zones if zone.name == owner), None)
    if zone is None:
        raise PlanError(_name(slot), f"a zone named {owner} is required")
    if plan.alignment % SLOT_ALIGNMENT:
        raise PlanError("alignment", f"a multiple of {SLOT_ALIGNMENT} is required, got {plan.alignment}")
    if slot.offset % plan.alignment:
        raise PlanError(_name(slot), f"a multiple of {plan.alignment} is required as offset, got {slot.offset}")
    if slot.offset < zone.offset or slot.offset + slot.nbytes > zone.offset + zone.nbytes:
        raise PlanError(
            _name(slot),
            f"must lie in [{zone.offset}, {zone.offset + zone.nbytes}), "
            f"got [{slot.offset}, {slot.offset + slot.nbytes})",
        )


def _check_shared(plan: KvPlan, slot: KvSlot) -> None:
    """A shared slot names an owner that has memory of its own, with the very same place and shape."""
    assert slot.shared_with is not None
    ref = slot.shared_with
    owner = plan.slot(ref.owner, ref.layer, ref.role)
    if owner.shared_with is not None:
        raise PlanError(_name(slot), f"{_name(ref)} must own its memory, but it is shared itself")
    mine = (slot.role, slot.dtype, slot.shape, slot.offset, slot.window)
    theirs = (owner.role, owner.dtype, owner.shape, owner.offset, owner.window)
    if mine != theirs:
        raise PlanError(_name(slot), f"must equal {_name(ref)} {theirs}, got {mine}")


def _check_overlap(ranges: list[tuple[int, int, str]]) -> None:
    """No two of the ranges (offset, nbytes, name) share a byte."""
    ordered = sorted(ranges)
    for (offset, nbytes, name), (later_offset, _, later_name) in pairwise(ordered):
        if offset + nbytes > later_offset:
            raise PlanError(later_name, f"must start at {offset + nbytes} or later, after {name}; got {later_offset}")
