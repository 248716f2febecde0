"""A planner for tests: places slots in any order with any gaps, so that the checker sees unusual good plans."""

from __future__ import annotations

from math import prod

from hypothesis import strategies as st

from dsc.bundle_schema.kv_plan import KvPlan, KvSlot, Owner, Role, SlotRef, Zone
from dsc.bundle_schema.model_info import KvLayer, ModelInfo
from dsc.bundle_schema.tensors import DType

SIZES = {"n_kv_heads": st.integers(1, 3), "head_dim": st.sampled_from([1, 7, 64])}
LAYERS = st.builds(KvLayer, **SIZES) | st.builds(
    KvLayer, **SIZES, window=st.integers(1, 20) | st.integers(100, 150), ring=st.booleans()
)


@st.composite
def infos(draw: st.DrawFn, min_layers: int = 1) -> ModelInfo:
    layers = draw(st.lists(LAYERS, min_size=min_layers, max_size=4))
    return ModelInfo(
        architecture="Toy",
        model_type="toy",
        vocab_size=8,
        hidden_size=8,
        n_layers=len(layers),
        n_heads=4,
        max_length=4096,
        n_parameters=1,
        kv_layers=tuple(layers),
        kv_dtype=draw(st.sampled_from([DType.FLOAT32, DType.FLOAT16])),
    )


@st.composite
def plans(draw: st.DrawFn) -> tuple[KvPlan, ModelInfo, ModelInfo | None]:
    """A good plan with the models that it is for; the draft may own memory, share the target's, or be absent."""
    target = draw(infos())
    kind = draw(st.sampled_from(["none", "own", "prefix"]))
    draft = None
    if kind == "own":
        draft = draw(infos())
    elif kind == "prefix":
        n_shared = draw(st.integers(1, len(target.kv_layers)))
        draft = target.model_copy(update={"kv_layers": target.kv_layers[:n_shared], "n_layers": n_shared})
    max_length, slack, n_slots = draw(st.integers(1, 40)), draw(st.integers(1, 17)), draw(st.integers(1, 3))
    slots: list[KvSlot] = []
    zones: list[Zone] = []
    end = 0
    models: list[tuple[Owner, ModelInfo]] = [("target", target)]
    if draft is not None and kind == "own":
        models.append(("draft", draft))
    for owner, info in draw(st.permutations(models)):
        start = -(-end // 4096) * 4096 + 4096 * draw(st.integers(0, 2))
        keys: list[tuple[int, Role]] = [(layer, role) for layer in range(len(info.kv_layers)) for role in ("k", "v")]
        offset = start
        for layer, role in draw(st.permutations(keys)):
            slot = _slot(draw, owner, layer, role, info, max_length, slack, n_slots, offset)
            slots.append(slot)
            offset = -(-(slot.offset + slot.nbytes) // 64) * 64 + 64 * draw(st.integers(0, 2))
        guard = 64 * draw(st.integers(1, 100))
        zones.append(Zone(name=owner, offset=start, nbytes=offset - start, guard_offset=offset, guard_nbytes=guard))
        end = offset + guard
    if draft is not None and kind == "prefix":
        slots += [_shared(slot) for slot in slots if slot.layer < len(draft.kv_layers)]
    plan = KvPlan(
        max_length=max_length,
        n_slots=n_slots,
        rollback_slack=slack,
        zones=tuple(zones),
        slots=tuple(draw(st.permutations(slots))),
        total_nbytes=end + draw(st.integers(0, 100)),
    )
    return plan, target, draft


def _slot(
    draw: st.DrawFn,
    owner: Owner,
    layer: int,
    role: Role,
    info: ModelInfo,
    max_length: int,
    slack: int,
    n_slots: int,
    offset: int,
) -> KvSlot:
    need = info.kv_layers[layer]
    window = need.window if need.ring and draw(st.booleans()) else None
    if window is None:
        rows = max_length + slack + draw(st.integers(0, 5))
    else:
        rows = -(-(window + slack) // 128) * 128 + 128 * draw(st.integers(0, 1))
    shape = (n_slots, need.n_kv_heads, rows, need.head_dim)
    nbytes = prod(shape) * info.kv_dtype.itemsize
    return KvSlot(
        owner=owner,
        layer=layer,
        role=role,
        dtype=info.kv_dtype,
        shape=shape,
        offset=offset,
        nbytes=nbytes,
        window=window,
    )


def _shared(slot: KvSlot) -> KvSlot:
    ref = SlotRef(owner=slot.owner, layer=slot.layer, role=slot.role)
    return slot.model_copy(update={"owner": "draft", "shared_with": ref})
