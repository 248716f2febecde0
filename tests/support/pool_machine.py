"""Random traffic on a pool of sequences, beside a plain model of it: a list of rows for each sequence and layer."""

from __future__ import annotations

from itertools import count

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from toy_bundle import toy_info

from dsc.bundle_schema.dflash_config import CacheHealth as HealthConfig
from dsc.bundle_schema.kv_plan import KvPlan
from dsc.bundle_schema.model_info import KvLayer
from dsc.compiler.plan_kv import plan_kv
from dsc.runtime.cache_health import CacheHealth
from dsc.runtime.kv_arena import KvArena
from dsc.runtime.kv_slots import KvSlots

MAX_LENGTH, SLACK, N_SLOTS, WINDOW = 400, 9, 4, 20
RING, ROOM = 256, 236  # rows of a ring, and how far it can be wound back
OWNERS = st.sampled_from(["target", "target", "draft"])
SEQUENCES = st.integers(0, N_SLOTS - 1)
some_live = precondition(lambda self: self.model)


def pool_plan(ring: bool, max_length: int = MAX_LENGTH) -> KvPlan:
    """Two target layers and one draft layer, of some pages each; with `ring` the second one keeps a window only."""
    windowed = KvLayer(n_kv_heads=1, head_dim=48, window=WINDOW, ring=ring)
    target = toy_info(max_length=max_length, kv_layers=(KvLayer(n_kv_heads=2, head_dim=64), windowed))
    draft = toy_info(max_length=max_length, kv_layers=(KvLayer(n_kv_heads=1, head_dim=80),))
    plan = plan_kv(target, draft, max_length, SLACK, N_SLOTS)
    assert [slot.rows for slot in plan.slots if slot.window is not None] == [RING, RING] * ring
    return plan


class Clock:
    """Milliseconds: a step each time that somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0
        self.step = 1.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


class ModelSequence:
    """What a sequence's rows must be, for each model: rows[i] is what was written for position i in every pool."""

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.rows: dict[str, list[float]] = {"target": [], "draft": []}
        self.pending: dict[str, list[float]] = {"target": [], "draft": []}
        self.top = {"target": 0, "draft": 0}  # rows that were ever written since the sequence was empty
        self.least = 0  # the shortest length that the target's ring can go back to


class PoolMachine(RuleBasedStateMachine):
    """Allocate, append, accept, reject, free, resize, repair, in any order and with any budget."""

    ring = False
    secure = False

    def __init__(self) -> None:
        super().__init__()
        self.pool = KvSlots(KvArena(pool_plan(self.ring), self.secure))
        self.clock = Clock()
        self.health = CacheHealth(self.pool, HealthConfig(), self.clock)
        self.model: dict[int, ModelSequence] = {}
        self.values = count(1)

    def pick(self, index: int) -> tuple[int, ModelSequence]:
        """One of the live sequences, by number."""
        name = sorted(self.model)[index % len(self.model)]
        return name, self.model[name]

    @rule(max_length=st.integers(1, MAX_LENGTH) | st.just(MAX_LENGTH))
    def allocate(self, max_length: int) -> None:
        name = self.pool.allocate(max_length)
        assert (name is None) == (len(self.model) == N_SLOTS)
        if name is not None:
            self.model[name] = ModelSequence(min(max_length, self.pool.max_length))

    @some_live
    @rule(index=SEQUENCES, owner=OWNERS, n_rows=st.integers(1, 150))
    def append(self, index: int, owner: str, n_rows: int) -> None:
        """A forward writes rows past the valid ones, up to the slack behind the longest length."""
        name, model = self.pick(index)
        length = len(model.rows[owner])
        n_rows = min(n_rows, SLACK + model.max_length - length)
        if model.pending[owner]:
            return
        assert self.pool.append(name, owner, n_rows) == length
        pools = self.pool.arena.pools_of(owner, self.pool.slot(name))
        values = [float(next(self.values)) for _ in range(n_rows)]
        for number, pool in enumerate(pools.values()):
            places = np.arange(length, length + n_rows) % pool.shape[2]
            pool[0, :, places] = np.array(values, np.float32)[:, None, None] + np.float32(number / 8)
        model.pending[owner] = values
        model.top[owner] = max(model.top[owner], length + n_rows)
        rings = any(slot.window is not None for slot in self.pool.arena.plan.slots)
        if rings and owner == "target" and length + n_rows > RING:
            model.least = max(model.least, length + n_rows - ROOM)

    @some_live
    @rule(index=SEQUENCES, owner=OWNERS, share=st.floats(0, 1))
    def accept(self, index: int, owner: str, share: float) -> None:
        name, model = self.pick(index)
        room = model.max_length - len(model.rows[owner])
        kept = min(round(share * len(model.pending[owner])), room)
        self.pool.accept(name, owner, kept)
        model.rows[owner] += model.pending[owner][:kept]
        model.pending[owner] = []

    @rule(index=SEQUENCES, owner=OWNERS, n_rows=st.integers(20, 150))
    @some_live
    def grow(self, index: int, owner: str, n_rows: int) -> None:
        """A whole round."""
        self.append(index, owner, n_rows)
        self.accept(index, owner, 1.0)

    @some_live
    @rule(index=SEQUENCES, owner=OWNERS, share=st.floats(0, 1))
    def rewind(self, index: int, owner: str, share: float) -> None:
        name, model = self.pick(index)
        length = round(share * len(model.rows[owner]))
        self.pool.rewind(name, owner, length)
        if owner == "target" and length < min(model.least, len(model.rows[owner])):
            length = 0  # the ring has written over what would be needed
        del model.rows[owner][length:]
        model.pending[owner] = []
        if length == 0:
            model.top[owner] = 0
            model.least = 0 if owner == "target" else model.least

    @some_live
    @rule(index=SEQUENCES)
    def free(self, index: int) -> None:
        name, _ = self.pick(index)
        self.pool.free(name)
        del self.model[name]

    @rule(max_length=st.integers(1, MAX_LENGTH))
    def resize(self, max_length: int) -> None:
        self.health.repairs.resize(max_length)
        assert self.pool.max_length <= MAX_LENGTH

    @rule(which=st.sampled_from(["defragment", "trim", "continue_resize"]), n_steps=st.integers(0, 60))
    def repair(self, which: str, n_steps: int) -> None:
        steps = iter(range(n_steps))
        getattr(self.health.repairs, which)(lambda: next(steps, None) is not None)

    @rule(min_density=st.floats(0, 1))
    def extend(self, min_density: float) -> None:
        self.health.repairs.extend(min_density)

    @rule(step=st.sampled_from([0.0, 1.0, 7.0, 50.0]))
    def scan(self, step: float) -> None:
        self.clock.now += 200
        self.clock.step = step
        assert self.health.scan() is not None

    @invariant()
    def every_row_is_where_the_pool_says(self) -> None:
        assert set(self.pool.live) == set(self.model)
        assert len({self.pool.slot(name) for name in self.model}) == len(self.model)
        for name, model in self.model.items():
            for owner, rows in model.rows.items():
                zone = self.pool.zone(name, owner)
                assert zone.length == len(rows) <= zone.reach
                pools = self.pool.arena.pools_of(owner, self.pool.slot(name))
                assert list(pools) == list(zone.pools)
                for number, (label, pool) in enumerate(pools.items()):
                    assert zone.pools[label].ctypes.data == pool.ctypes.data
                    self._check_rows(pool, rows, model.top[owner], number)
                    if self.secure:
                        self._check_wiped(pool, len(rows) + len(model.pending[owner]))
        self.pool.arena.check_guards()

    def _check_rows(self, pool: np.ndarray, rows: list[float], top: int, number: int) -> None:
        n_rows = pool.shape[2]
        for_ring = top - n_rows  # positions below have been written over
        places = np.arange(max(for_ring, 0), len(rows))
        expected = np.array(rows, np.float32)[places] + np.float32(number / 8)
        assert (pool[0][:, places % n_rows] == expected[None, :, None]).all()

    def _check_wiped(self, pool: np.ndarray, n_written: int) -> None:
        assert not pool[0, :, n_written:].any()
