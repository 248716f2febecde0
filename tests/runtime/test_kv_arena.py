import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy_bundle import toy_plan

from dsc.bundle_schema.errors import PlanError
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


def test_a_ring_that_lost_rows_is_read_again():
    zone = KvArena(toy_plan(max_length=40, window=8)).zone("target", 40)
    zone.commit(30, 30)
    zone.rewind(28)
    assert zone.length == 28
    zone.rewind(5)
    assert zone.length == 0


ROUNDS = st.tuples(st.just("round"), st.integers(1, 9), st.integers(1, 9))
REWINDS = st.tuples(st.just("rewind"), st.integers(0, 12), st.just(0))


@given(st.lists(ROUNDS | REWINDS, max_size=40))
def test_rows_that_a_window_needs_are_never_eaten(events):
    """A ring as small as the checker allows: whatever was drafted, rejected and wound back, live rows are their own."""
    zone = KvArena(toy_plan(max_length=400, window=8)).zone("target", 400)
    n_rows = 8 + 9  # the window and the plan's rollback slack
    holds = np.full(n_rows, -1)
    for kind, first, second in events:
        if kind == "rewind":
            zone.rewind(max(0, zone.length - first))
        else:
            written = np.arange(zone.length, zone.length + first)
            holds[written % n_rows] = written
            zone.commit(first, min(first, second))
        live = np.arange(max(0, zone.length - 8), zone.length)
        np.testing.assert_array_equal(holds[live % n_rows], live)


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
