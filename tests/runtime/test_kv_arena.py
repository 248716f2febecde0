import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pool_machine import pool_plan
from toy_bundle import toy_info, toy_plan

from dsc.bundle_schema.errors import PlanError
from dsc.bundle_schema.kv_layout import lay_out
from dsc.bundle_schema.kv_plan import check_plan
from dsc.bundle_schema.model_info import KvLayer
from dsc.runtime.kv_arena import KvArena, Rejected


def test_views_are_where_the_plan_says():
    plan = toy_plan(max_length=20, draft_layers=1)
    arena = KvArena(plan)
    target, draft = arena.zone("target", 20), arena.zone("draft", 20)
    base = target.pools["k_pool.0"].ctypes.data - plan.slot("target", 0, "k").offset
    assert base % 4096 == 0
    for zone in (target, draft):
        for name, pool in zone.pools.items():
            role, layer = name.split("_pool.")
            slot = plan.slot(zone.owner, int(layer), role)
            assert pool.ctypes.data == base + slot.offset
            assert pool.shape == (1, *slot.shape[1:])


def test_rejection_moves_a_length_and_leaves_the_rows():
    zone = KvArena(toy_plan(max_length=20)).zone("target", 20)
    zone.pools["k_pool.0"][:] = 5
    zone.commit(written=6, kept=4)
    assert (zone.length, list(zone.journal)) == (4, [Rejected(4, 6)])
    zone.rewind(1)
    assert (zone.length, zone.journal[-1]) == (1, Rejected(1, 4))
    assert (zone.pools["k_pool.0"] == 5).all()


def test_secure_rollback_zeroes_exactly_the_rejected_rows():
    zone = KvArena(toy_plan(max_length=20), secure_rollback=True).zone("target", 20)
    for pool in zone.pools.values():
        pool[:] = 5
    zone.commit(written=6, kept=4)
    for pool in zone.pools.values():
        assert not pool[:, :, 4:6].any()
        assert (pool[:, :, :4] == 5).all()
        assert (pool[:, :, 6:] == 5).all()


def test_rewinding_to_more_than_is_there_changes_nothing():
    zone = KvArena(toy_plan(max_length=20)).zone("target", 20)
    zone.commit(3, 3)
    zone.rewind(7)
    assert zone.length == 3


def test_an_overfull_zone_is_refused_with_both_numbers():
    zone = KvArena(toy_plan(max_length=20)).zone("target", 20)
    with pytest.raises(PlanError, match="up to 20 fit, got 21 of 21 after 0"):
        zone.commit(21, 21)


def smallest_ring(max_length=400, window=119):
    """A zone of a ring as small as the checker allows: 128 rows for the window and 9 rows of a round."""
    plan = toy_plan(max_length=max_length)
    slots = [slot.model_copy(update={"shape": (1, 1, 128, 1), "window": window}) for slot in plan.slots]
    plan = lay_out(slots, max_length, plan.rollback_slack)
    layer = KvLayer(n_kv_heads=1, head_dim=1, window=window, ring=True)
    check_plan(plan, toy_info(max_length=max_length, kv_layers=(layer,)))
    return KvArena(plan).zone("target", max_length)


def test_a_ring_that_lost_rows_is_read_again():
    zone = smallest_ring()
    zone.commit(200, 200)
    zone.rewind(191)
    assert zone.length == 191
    zone.rewind(190)
    assert (zone.length, zone.emptied) == (0, 1)


def test_a_ring_that_is_not_full_is_wound_back_like_any_layer():
    zone = smallest_ring()
    zone.commit(128, 128)
    zone.rewind(3)
    assert (zone.length, zone.emptied) == (3, 0)


def test_rows_of_a_forward_that_failed_count_as_written():
    """It may have written over any of them before it raised, so a rewind must not rely on what was there."""
    zone = smallest_ring()
    zone.commit(190, 190)
    zone.expect(9)
    assert zone.keeps(190)
    zone.rewind(189)
    assert zone.length == 0


def test_a_forward_that_a_ring_has_no_room_for_is_refused():
    zone = smallest_ring()
    with pytest.raises(PlanError, match="takes 9 rows at once, got 10"):
        zone.expect(10)


ROUNDS = st.tuples(st.just("round"), st.integers(1, 9), st.integers(1, 9))
PIECES = st.tuples(st.just("round"), st.just(9), st.just(9))
REWINDS = st.tuples(st.just("rewind"), st.integers(0, 12), st.just(0))


@given(st.lists(ROUNDS | PIECES | REWINDS, max_size=80))
def test_rows_that_a_window_needs_are_never_eaten(events):
    """Whatever was drafted, rejected and wound back: the rows that the next one sees hold their own positions."""
    zone = smallest_ring(max_length=1000)
    holds = np.full(128, -1)
    for kind, first, second in events:
        if kind == "rewind":
            zone.rewind(max(0, zone.length - first))
        else:
            zone.expect(first)
            written = np.arange(zone.length, zone.length + first)
            holds[written % 128] = written
            zone.commit(first, min(first, second))
        seen = np.arange(max(0, zone.length - 118), zone.length)
        np.testing.assert_array_equal(holds[seen % 128], seen)


def test_a_write_into_a_guard_is_named():
    plan = toy_plan(max_length=20, draft_layers=1)
    arena = KvArena(plan)
    arena.check_guards()
    pool = arena.zone("draft", 20).pools["v_pool.0"]
    guard = plan.zones[1].guard_offset
    base = pool.ctypes.data - plan.slot("draft", 0, "v").offset
    np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * 1).from_address(base + guard + 3))[0] = 0
    with pytest.raises(PlanError, match=f"draft zone: its guard was overwritten at byte {guard + 3}"):
        arena.check_guards()


def test_a_ring_gives_its_memory_back_with_the_whole_sequence_only():
    arena = KvArena(pool_plan(ring=True))
    pools = arena.pools_of("target", 1)
    for pool in pools.values():
        pool[:] = 1
    arena.release("target", 1, 300)
    assert pools["k_pool.1"].all()
    assert pools["k_pool.0"][:, :, :300].all()
    arena.release("target", 1, 0)
    assert not pools["k_pool.1"][0, 0, 40:200].any()
    assert not pools["k_pool.0"][0, 0, 40:200].any()
