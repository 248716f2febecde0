import pytest
from hypothesis import settings
from pool_machine import MAX_LENGTH, PoolMachine, pool_plan

from dsc.bundle_schema.errors import PlanError
from dsc.runtime import kv_transfer
from dsc.runtime.kv_arena import KvArena
from dsc.runtime.kv_repairs import KvRepairs
from dsc.runtime.kv_slots import KvSlots

TRAFFIC = settings(max_examples=40, stateful_step_count=50)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """A move takes many steps."""
    monkeypatch.setattr(kv_transfer, "_PIECE_NBYTES", 8192)


class RingMachine(PoolMachine):
    ring = True


class SecureMachine(PoolMachine):
    secure = True


class TestLinearPool(PoolMachine.TestCase):
    settings = TRAFFIC


class TestPoolWithARing(RingMachine.TestCase):
    settings = TRAFFIC


class TestSecurePool(SecureMachine.TestCase):
    settings = TRAFFIC


def new_pool() -> KvSlots:
    return KvSlots(KvArena(pool_plan(ring=False)))


def filled(pool: KvSlots, n_rows: int) -> int:
    name = pool.allocate()
    assert name is not None
    pool.append(name, "target", n_rows)
    for pool_rows in pool.zone(name, "target").pools.values():
        pool_rows[:, :, :n_rows] = name
    pool.accept(name, "target", n_rows)
    return name


def steps(count: int):
    left = iter(range(count))
    return lambda: next(left, None) is not None


def test_a_pool_without_a_free_slot_refuses_and_counts():
    pool = new_pool()
    names = [pool.allocate() for _ in range(5)]
    assert names == [1, 2, 3, 4, None]
    assert pool.counts.refused == 1
    pool.free(2)
    assert pool.allocate() == 5
    assert pool.slot(5) == 1


def test_rows_past_the_slack_are_refused_before_they_are_written():
    pool = new_pool()
    name = pool.allocate(max_length=30)
    pool.append(name, "target", 39)
    with pytest.raises(PlanError, match="accepted or rejected"):
        pool.append(name, "target", 1)
    pool.accept(name, "target", 30)
    with pytest.raises(PlanError, match="1 to 9 rows fit after 30, got 10"):
        pool.append(name, "target", 10)
    pool.append(name, "target", 9)
    with pytest.raises(PlanError, match="rows up to 30 fit"):
        pool.accept(name, "target", 1)


def test_an_ended_sequence_is_named():
    pool = new_pool()
    name = pool.allocate()
    pool.free(name)
    for call in (lambda: pool.free(name), lambda: pool.slot(name), lambda: pool.append(name, "target", 1)):
        with pytest.raises(PlanError, match=f"sequence {name}"):
            call()


def test_a_move_stops_anywhere_and_takes_along_what_changed_meanwhile():
    pool = new_pool()
    repairs = KvRepairs(pool)
    first, last = filled(pool, 10), filled(pool, 100)
    pool.free(first)
    assert not repairs.defragment(steps(2))
    assert pool.slot(last) == 1
    pool.rewind(last, "target", 3)
    pool.append(last, "target", 20)
    for rows in pool.zone(last, "target").pools.values():
        rows[:, :, 3:23] = 7
    pool.accept(last, "target", 15)
    while not repairs.defragment(steps(1)):
        pass
    assert (pool.slot(last), pool.span, repairs.counts.moved) == (0, 1, 1)
    for rows in pool.arena.pools_of("target", 0).values():
        assert (rows[:, :, :3] == last).all()
        assert (rows[:, :, 3:18] == 7).all()


def test_a_move_whose_slot_is_taken_is_given_up():
    pool = new_pool()
    repairs = KvRepairs(pool)
    first, last = filled(pool, 10), filled(pool, 100)
    pool.free(first)
    repairs.defragment(steps(2))
    filled(pool, 5)
    assert repairs.defragment()
    assert (pool.slot(last), repairs.counts.abandoned) == (1, 1)


def test_nothing_moves_while_rows_wait_for_their_verdict():
    pool = new_pool()
    repairs = KvRepairs(pool)
    first, last = filled(pool, 10), filled(pool, 100)
    pool.free(first)
    pool.append(last, "target", 4)
    assert not repairs.defragment()
    assert pool.slot(last) == 1
    pool.accept(last, "target", 4)
    assert repairs.defragment()
    assert pool.slot(last) == 0


def test_a_smaller_length_waits_for_longer_sequences_and_cuts_none():
    pool = new_pool()
    repairs = KvRepairs(pool)
    long = filled(pool, 150)
    old = pool.arena
    repairs.resize(50)
    assert pool.max_length == 50
    assert not repairs.continue_resize()
    assert repairs.resize_waits_for == (long,)
    short = filled(pool, 40)
    pool.append(long, "target", 50)
    pool.accept(long, "target", 50)
    pool.free(long)
    assert repairs.continue_resize()
    assert pool.arena is not old
    assert pool.epoch == 1
    assert pool.arena.nbytes < old.nbytes
    for rows in pool.arena.pools_of("target", pool.slot(short)).values():
        assert (rows[:, :, :40] == short).all()


def test_a_larger_length_holds_when_its_memory_is_there():
    pool = new_pool()
    repairs = KvRepairs(pool)
    repairs.resize(50)
    repairs.continue_resize()
    name = filled(pool, 40)
    repairs.resize(180)
    assert not repairs.continue_resize(steps(1))
    assert pool.max_length == 50
    while not repairs.continue_resize(steps(1)):
        pass
    assert pool.max_length == 180
    assert pool.zone(name, "target").length == 40


def test_a_length_beyond_the_bundle_is_refused_and_changes_nothing():
    pool = new_pool()
    repairs = KvRepairs(pool)
    with pytest.raises(PlanError, match=f"1 to {MAX_LENGTH} are possible in this bundle, got {MAX_LENGTH + 1}"):
        repairs.resize(MAX_LENGTH + 1)
    assert (pool.max_length, repairs.continue_resize(), pool.epoch) == (MAX_LENGTH, True, 0)


def test_secure_rollback_leaves_no_copies_behind():
    pool = KvSlots(KvArena(pool_plan(ring=False), secure_rollback=True))
    repairs = KvRepairs(pool)
    first, last = filled(pool, 10), filled(pool, 100)
    pool.free(first)
    repairs.defragment(steps(3))
    taken = pool.allocate()
    assert not any(rows.any() for rows in pool.zone(taken, "target").pools.values())
    pool.free(taken)
    repairs.defragment()
    repairs.defragment(steps(3))
    pool.rewind(last, "target", 20)
    while not repairs.defragment(steps(3)):
        pass
    for rows in pool.arena.pools_of("target", pool.slot(last)).values():
        assert (rows[:, :, :20] == last).all()
        assert not rows[:, :, 20:].any()
    assert not any(rows.any() for rows in pool.arena.pools_of("target", 1).values())


def test_secure_rollback_leaves_no_copies_in_a_new_arena():
    pool = KvSlots(KvArena(pool_plan(ring=False), secure_rollback=True))
    repairs = KvRepairs(pool)
    names = [pool.allocate(100) for _ in range(2)]
    for name in names:
        pool.append(name, "target", 40)
        for rows in pool.zone(name, "target").pools.values():
            rows[:, :, :40] = name
        pool.accept(name, "target", 40)
    repairs.resize(100)
    assert not repairs.continue_resize(steps(2))
    pool.free(names[0])
    assert repairs.continue_resize()
    for rows in pool.arena.pools("target").values():
        assert not rows[0].any()
        assert (rows[1, :, :40] == names[1]).all()
