import numpy as np
import pytest
from pool_machine import Clock, pool_plan

from dsc.bundle_schema.dflash_config import CacheHealth as HealthConfig
from dsc.bundle_schema.errors import PlanError
from dsc.runtime import kv_transfer
from dsc.runtime.cache_health import CacheHealth, measure
from dsc.runtime.kv_arena import KvArena
from dsc.runtime.kv_slots import KvSlots


class Healthy:
    """A pool under supervision, with a clock that moves only when told."""

    def __init__(self) -> None:
        self.pool = KvSlots(KvArena(pool_plan(ring=False, max_length=200)))
        self.clock = Clock()
        self.clock.step = 0.0
        self.health = CacheHealth(self.pool, HealthConfig(), self.clock)

    def sequence(self, target_rows: int, draft_rows: int | None = None) -> int:
        name = self.pool.allocate()
        assert name is not None
        self.write(name, "target", target_rows)
        self.write(name, "draft", target_rows if draft_rows is None else draft_rows)
        return name

    def write(self, name: int, owner: str, n_rows: int) -> None:
        if n_rows:
            self.pool.append(name, owner, n_rows)
            self.pool.accept(name, owner, n_rows)

    def scan(self, step: float = 0.0):
        self.clock.now += 200
        self.clock.step = step
        result = self.health.scan()
        self.clock.step = 0.0
        return result


def test_the_three_metrics_are_what_they_are_defined_as():
    world = Healthy()
    names = [world.sequence(100) for _ in range(4)]
    assert measure(world.pool).__dict__ == {"density": 1.0, "fragmentation": 0.0, "layer_spread": 0.0}
    world.pool.rewind(names[3], "target", 40)  # rows of its two target layers, and of the one draft layer
    world.pool.free(names[1])
    world.pool.free(names[2])
    health = measure(world.pool)
    assert health.density == (2 * 100 + 100 + 40) / (4 * 100)
    assert health.fragmentation == 2 / 4
    assert health.layer_spread == pytest.approx(np.std([40, 40, 100]) / 60)


def test_an_empty_pool_is_healthy():
    health = measure(Healthy().pool)
    assert (health.density, health.fragmentation, health.layer_spread) == (1.0, 0.0, 0.0)


def test_a_scan_is_due_every_200_ms():
    world = Healthy()
    world.clock.now = 199.0
    assert world.health.scan() is None
    world.clock.now = 200.0
    assert world.health.scan() is not None
    assert world.health.scan() is None
    assert world.health.counts.scans == 1


def test_holes_are_closed_and_counted():
    world = Healthy()
    first, last = world.sequence(10), world.sequence(10)
    world.pool.free(first)
    world.scan()
    assert world.pool.slot(last) == 0
    report = world.health.report()
    assert (report["defragmentations"], report["moved"], report["out_of_time"]) == (1, 1, 0)


def test_a_small_hole_in_a_large_pool_is_left():
    world = Healthy()
    world.health.config = HealthConfig(max_fragmentation=0.25)
    first, last = world.sequence(10), world.sequence(10)
    world.pool.free(first)
    world.scan()
    assert world.pool.slot(last) == 1


def test_memory_of_rows_that_do_not_hold_goes_back():
    world = Healthy()
    name = world.sequence(200)
    for pool in world.pool.arena.pools_of("target", 0).values():
        pool[:] = 3
    world.pool.rewind(name, "target", 50)
    world.pool.rewind(name, "draft", 50)
    world.scan()
    assert measure(world.pool).density == 1.0
    assert world.health.report()["trimmed_rows"] == 300
    for pool in world.pool.arena.pools_of("target", 0).values():
        assert (pool[:, :, :50] == 3).all()
        assert not pool[:, :, 100:240].any()


def test_memory_is_touched_ahead_only_while_the_layers_keep_pace():
    world = Healthy()
    name = world.sequence(110)
    world.scan()
    assert world.health.report()["extended_rows"] == 2 * (128 - 110)
    world.write(name, "target", 35)  # the draft has stopped reading
    world.scan()
    report = world.health.report()
    assert report["layer_spread"] > 0.08
    assert (report["extended_rows"], report["extensions_withheld"]) == (2 * (128 - 110), 1)
    world.write(name, "draft", 35)
    world.scan()
    assert world.health.report()["extended_rows"] == 2 * (128 - 110)  # 145 of 200 rows would not be dense
    world.write(name, "target", 47)
    world.write(name, "draft", 47)
    world.scan()
    assert world.health.report()["extended_rows"] == 2 * (128 - 110) + 2 * (200 - 192)


def test_a_repair_ends_with_its_budget_and_goes_on_at_the_next_scan(monkeypatch):
    monkeypatch.setattr(kv_transfer, "_PIECE_NBYTES", 8192)
    world = Healthy()
    first, last = world.sequence(10), world.sequence(180)
    world.pool.free(first)
    n_scans = 0
    while world.pool.slot(last) != 0:
        world.scan(step=4.0)  # each look at the clock takes 4 ms
        n_scans += 1
        assert world.health.counts.longest_ms <= 20 + 4 * 3
    report = world.health.report()
    assert n_scans > 3
    assert (report["defragmentations"], report["moved"]) == (1, 1)
    assert report["continued"] >= n_scans - 1
    assert report["out_of_time"] >= n_scans - 1


def test_a_resize_is_brought_about_by_scans():
    world = Healthy()
    name = world.sequence(30)
    world.pool.free(name)
    name = world.pool.allocate(60)
    world.health.repairs.resize(60)
    world.scan()
    assert (world.pool.epoch, world.pool.arena.plan.max_length) == (1, 60)


def test_an_overrun_is_an_error_and_not_a_repair():
    world = Healthy()
    arena = world.pool.arena
    arena._memory[arena.plan.zones[0].guard_offset] = 0
    with pytest.raises(PlanError, match="target zone: its guard was overwritten"):
        world.scan()
