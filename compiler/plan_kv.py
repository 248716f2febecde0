"""The joint KV planner: from what two models need to byte offsets in one arena. Pure, no I/O."""

from __future__ import annotations

from dsc.bundle_schema.errors import PlanError
from dsc.bundle_schema.kv_layout import MAX_SLOTS, lay_out, layer_rows
from dsc.bundle_schema.kv_plan import KvPlan, KvSlot, Owner, Role, SlotRef, check_plan
from dsc.bundle_schema.model_info import ModelInfo

ROLES: tuple[Role, Role] = ("k", "v")


def plan_kv(
    target: ModelInfo,
    draft: ModelInfo | None,
    max_length: int,
    rollback_slack: int,
    n_slots: int = 1,
    shared: bool = False,
) -> KvPlan:
    """Place every layer's keys and values of target and draft in one arena.

    Each model has a zone that starts on a page and is followed by a guard. A layer has room for
    ``max_length + rollback_slack`` rows, rounded up to whole tiles of 128, so that a rejected block can
    never reach live rows. Layers whose graphs can do with a ring have one where that takes fewer rows.

    Args:
        max_length: positions a sequence may have, prompt and output together.
        rollback_slack: rows of the widest round, K + 1.
        shared: the draft continues the target's cache and has none of its own; see `may_share`.

    Raises:
        PlanError: `max_length` is longer than the target's own positions, or it or `n_slots` is out of range.
    """
    if max_length < 1:
        raise PlanError("max_length", f"at least 1 is required, got {max_length}")
    if not 1 <= n_slots <= MAX_SLOTS:
        raise PlanError("slots", f"1 to {MAX_SLOTS} are possible, got {n_slots}")
    check_positions(target.architecture, target.max_length, max_length)
    slots = _slots("target", target, max_length, rollback_slack, n_slots)
    if draft is not None:
        slots += _slots("draft", draft, max_length, rollback_slack, n_slots, shared)
    plan = lay_out(slots, max_length, rollback_slack)
    check_plan(plan, target, draft)
    return plan


def may_share(target: ModelInfo, draft: ModelInfo) -> bool:
    """Whether a draft of the target's own weights can continue its cache: the rows of both look the same."""
    return (target.kv_layers, target.kv_dtype) == (draft.kv_layers, draft.kv_dtype)


def check_positions(architecture: str, positions: int, max_length: int) -> None:
    """Refuse sequences that are longer than the model's own positions.

    Raises:
        PlanError: says how many it has.
    """
    if max_length > positions:
        raise PlanError("max_length", f"{architecture} has at most {positions} positions, got {max_length}")


def _slots(
    owner: Owner, info: ModelInfo, max_length: int, rollback_slack: int, n_slots: int, shared: bool = False
) -> list[KvSlot]:
    slots = []
    for index, layer in enumerate(info.kv_layers):
        rows, window = layer_rows(layer.window if layer.ring else None, max_length, rollback_slack)
        shape = (n_slots, layer.n_kv_heads, rows, layer.head_dim)
        slots += [
            KvSlot(
                owner=owner,
                layer=index,
                role=role,
                dtype=info.kv_dtype,
                shape=shape,
                offset=0,
                nbytes=0,
                window=window,
                shared_with=SlotRef(owner="target", layer=index, role=role) if shared else None,
            )
            for role in ROLES
        ]
    return slots


def longest_length(
    target: ModelInfo,
    draft: ModelInfo | None,
    memory_nbytes: int,
    rollback_slack: int,
    n_slots: int = 1,
    shared: bool = False,
) -> int:
    """The longest sequence whose plan fits in `memory_nbytes`; 0 when none does."""

    def fits(max_length: int) -> bool:
        plan = plan_kv(target, draft, max_length, rollback_slack, n_slots, shared)
        return plan.total_nbytes <= memory_nbytes

    low, high = 0, target.max_length
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def kv_nbytes_per_token(info: ModelInfo) -> int:
    """Bytes that one position takes in all layers."""
    heads = sum(layer.n_kv_heads * layer.head_dim for layer in info.kv_layers)
    return 2 * heads * info.kv_dtype.itemsize
