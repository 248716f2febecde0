"""The plan's checker: unusual good plans pass, every seeded corruption is caught and named."""

import re
from typing import Any

import pytest
from bundle_samples import sample_info
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_plans import plans

from dsc.bundle_schema.errors import PlanError
from dsc.bundle_schema.kv_plan import KvPlan, KvSlot, SlotRef, Zone, check_plan, dump_plan, parse_plan
from dsc.bundle_schema.tensors import DType

ARENAS = plans()


@given(ARENAS)
def test_good_plans_pass_and_round_trip(case):
    plan, target, draft = case
    check_plan(plan, target, draft)
    data = dump_plan(plan)
    assert parse_plan(data) == plan
    assert dump_plan(parse_plan(data)) == data


@given(ARENAS)
def test_no_two_owned_slots_share_a_byte(case):
    """The checker against brute force: bytes of owned slots, marked one by one."""
    plan, target, draft = case
    check_plan(plan, target, draft)
    seen: set[int] = set()
    for slot in plan.slots:
        if slot.shared_with is None:
            blocks = set(range(slot.offset // 64, -(-(slot.offset + slot.nbytes) // 64)))
            assert not blocks & seen
            seen |= blocks
    for zone in plan.zones:
        guard = set(range(-(-zone.guard_offset // 64), (zone.guard_offset + zone.guard_nbytes) // 64))
        assert not guard & seen


def change_slot(draw: st.DrawFn, plan: KvPlan, **changes: Any) -> KvPlan:
    index = draw(st.integers(0, len(plan.slots) - 1))
    slot = plan.slots[index]
    new = slot.model_copy(update={key: value(slot) if callable(value) else value for key, value in changes.items()})
    return plan.model_copy(update={"slots": (*plan.slots[:index], new, *plan.slots[index + 1 :])})


def change_zone(draw: st.DrawFn, plan: KvPlan, **changes: Any) -> KvPlan:
    index = draw(st.integers(0, len(plan.zones) - 1))
    zone = plan.zones[index]
    new = zone.model_copy(update={key: value(zone) for key, value in changes.items()})
    return plan.model_copy(update={"zones": (*plan.zones[:index], new, *plan.zones[index + 1 :])})


def with_rows(slot: KvSlot, rows: int) -> dict[str, Any]:
    n_slots, heads, _, size = slot.shape
    shape = (n_slots, heads, rows, size)
    return {"shape": shape, "nbytes": n_slots * heads * rows * size * slot.dtype.itemsize}


CORRUPTIONS = {
    "slot moved into a neighbour": lambda draw, plan: overlap(draw, plan),
    "slot out of its zone": lambda draw, plan: change_slot(draw, plan, offset=lambda slot: plan.total_nbytes + 4096),
    "slot in the guard": lambda draw, plan: into_the_guard(draw, plan),
    "slot off its alignment": lambda draw, plan: change_slot(draw, plan, offset=lambda slot: slot.offset + 4),
    "size too small": lambda draw, plan: change_slot(draw, plan, nbytes=lambda slot: slot.nbytes - 1),
    "size too large": lambda draw, plan: change_slot(draw, plan, nbytes=lambda slot: slot.nbytes + 64),
    "too few rows": lambda draw, plan: too_few_rows(draw, plan),
    "heads": lambda draw, plan: change_slot(draw, plan, shape=lambda slot: (slot.shape[0], 9, *slot.shape[2:])),
    "head size": lambda draw, plan: change_slot(draw, plan, shape=lambda slot: (*slot.shape[:3], 9)),
    "slots": lambda draw, plan: change_slot(draw, plan, shape=lambda slot: (9, *slot.shape[1:])),
    "dtype": lambda draw, plan: change_slot(draw, plan, dtype=DType.INT8),
    "ring of another window": lambda draw, plan: change_slot(draw, plan, window=21),
    "layer that no model has": lambda draw, plan: change_slot(draw, plan, layer=99),
    "layer missing": lambda draw, plan: plan.model_copy(update={"slots": plan.slots[1:]}),
    "layer twice": lambda draw, plan: plan.model_copy(update={"slots": (*plan.slots, plan.slots[0])}),
    "zone off its page": lambda draw, plan: change_zone(draw, plan, offset=lambda zone: zone.offset + 64),
    "zone twice": lambda draw, plan: plan.model_copy(update={"zones": (*plan.zones, plan.zones[0])}),
    "no zones": lambda draw, plan: plan.model_copy(update={"zones": ()}),
    "guard inside its zone": lambda draw, plan: change_zone(
        draw, plan, guard_offset=lambda zone: zone.offset + zone.nbytes - 64
    ),
    "arena too small": lambda draw, plan: plan.model_copy(update={"total_nbytes": plan.zones[0].nbytes - 1}),
    "alignment": lambda draw, plan: plan.model_copy(update={"alignment": 32}),
    "longer": lambda draw, plan: longer(plan),
    "more slots": lambda draw, plan: plan.model_copy(update={"n_slots": 7}),
    "shared with nobody": lambda draw, plan: change_slot(
        draw, plan, shared_with=SlotRef(owner="target", layer=98, role="k")
    ),
    "shared with itself": lambda draw, plan: change_slot(
        draw, plan, shared_with=lambda slot: SlotRef(owner=slot.owner, layer=slot.layer, role=slot.role)
    ),
}


def owned(plan: KvPlan) -> list[KvSlot]:
    return [slot for slot in plan.slots if slot.shared_with is None]


def overlap(draw: st.DrawFn, plan: KvPlan) -> KvPlan:
    first, second = draw(st.permutations(owned(plan)))[:2]
    slots = tuple(slot.model_copy(update={"offset": first.offset}) if slot == second else slot for slot in plan.slots)
    return plan.model_copy(update={"slots": slots})


def into_the_guard(draw: st.DrawFn, plan: KvPlan) -> KvPlan:
    slot = draw(st.sampled_from(owned(plan)))
    zone: Zone = next(zone for zone in plan.zones if zone.name == slot.owner)
    moved = slot.model_copy(update={"offset": zone.guard_offset})
    return plan.model_copy(update={"slots": tuple(moved if other == slot else other for other in plan.slots)})


def longer(plan: KvPlan) -> KvPlan:
    assume(any(slot.window is None for slot in plan.slots))  # rings do not grow with the length
    return plan.model_copy(update={"max_length": 4096})


def too_few_rows(draw: st.DrawFn, plan: KvPlan) -> KvPlan:
    slot = draw(st.sampled_from(plan.slots))
    least = (plan.max_length if slot.window is None else slot.window) + plan.rollback_slack
    assume(least > 1)
    smaller = slot.model_copy(update=with_rows(slot, least - 1))
    return plan.model_copy(update={"slots": tuple(smaller if other == slot else other for other in plan.slots)})


@pytest.mark.parametrize("name", CORRUPTIONS)
@settings(max_examples=15)
@given(data=st.data())
def test_every_corruption_is_caught_and_named(name: str, data: st.DataObject):
    plan, target, draft = data.draw(ARENAS)
    check_plan(plan, target, draft)
    bad = CORRUPTIONS[name](data.draw, plan)
    with pytest.raises(PlanError) as caught:
        check_plan(bad, target, draft)
    assert re.match(
        r"(target|draft) layer \d+ [kv]:|(target|draft) (zone|guard):|zones:|arena:|alignment:", str(caught.value)
    )


@settings(max_examples=50)
@given(ARENAS)
def test_a_plan_for_other_models_is_refused(case):
    plan, target, draft = case
    deeper = target.model_copy(update={"kv_layers": (*target.kv_layers, target.kv_layers[0])})
    with pytest.raises(PlanError, match="is required and missing"):
        check_plan(plan, deeper, draft)
    if draft is not None:
        with pytest.raises(PlanError, match=r"no model has such a layer|no model named draft"):
            check_plan(plan, target, None)


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        (b'"max_length": 8', b'"max_length": -8', "max_length"),
        (b'"max_length": 8', b'"max_length": 1000000000000000000', "max_length"),
        (b'"max_length": 8', b'"max_length": 0', "max_length"),
        (b'"max_length": 8', b'"max_length": 8.0', "max_length"),
        (b'"n_slots": 1', b'"n_slots": 1, "surprise": 1', "surprise"),
        (b'"slots": []', b'"slots": [7]', "slots.0"),
        (b'"rollback_slack": 2', b'"rollback_slack": true', "rollback_slack"),
    ],
)
def test_bad_numbers_are_plan_errors_that_name_the_field(old: bytes, new: bytes, field: str):
    plan = KvPlan(max_length=8, n_slots=1, rollback_slack=2, zones=(), slots=(), total_nbytes=0)
    data = dump_plan(plan)
    assert old in data
    with pytest.raises(PlanError, match=re.escape(f"kv_plan.json: {field}: ")):
        parse_plan(data.replace(old, new))


def test_slot_finds_its_layer():
    plan = KvPlan(max_length=8, n_slots=1, rollback_slack=2, zones=(), slots=(), total_nbytes=0)
    with pytest.raises(PlanError, match="target layer 0 k: is not in the plan"):
        plan.slot("target", 0, "k")
    with pytest.raises(PlanError, match="target layer 0 k: is required and missing"):
        check_plan(plan, sample_info())
