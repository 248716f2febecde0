import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_plans import plans

from dsc.bundle_schema.errors import PlanError
from dsc.bundle_schema.kv_layout import resized, without_rings
from dsc.bundle_schema.kv_plan import check_plan


@given(plans(), st.integers(1, 40), st.integers(1, 5))
def test_any_plan_laid_out_again_passes_the_independent_checker(sample, max_length, n_slots):
    plan, target, draft = sample
    again = resized(plan, min(max_length, plan.max_length), n_slots)
    check_plan(again, target, draft)
    assert (again.max_length, again.n_slots) == (min(max_length, plan.max_length), n_slots)
    assert [(slot.owner, slot.layer, slot.role) for slot in again.slots] == [
        (slot.owner, slot.layer, slot.role) for slot in plan.slots
    ]


@given(plans(), st.integers(1, 900), st.integers(1, 3))
def test_a_longer_plan_keeps_its_rings_and_can_do_without(sample, max_length, n_slots):
    plan, target, draft = sample
    long = plan.model_copy(update={"max_length": 1000})
    for again in (resized(long, max_length, n_slots), without_rings(resized(long, max_length, n_slots))):
        check_plan(again, target, draft)
        assert all(slot.window is None or slot.rows < max_length + plan.rollback_slack for slot in again.slots)
    assert all(slot.window is None for slot in again.slots)
    assert without_rings(again) == again


@given(plans())
def test_sizes_out_of_range_are_refused_with_the_range(sample):
    plan, _, _ = sample
    with pytest.raises(PlanError, match=f"1 to {plan.max_length} are possible"):
        resized(plan, plan.max_length + 1, 1)
    with pytest.raises(PlanError, match="1 to 256 are possible, got 0"):
        resized(plan, 1, 0)
