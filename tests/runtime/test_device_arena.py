"""The arena on a device: where pools lie, what is erased, and that everything is given back; on the mock driver."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from toy_bundle import toy_plan

from dsc.bundle_schema.errors import HostError, PlanError
from dsc.runtime.cuda_driver import CudaDriver
from dsc.runtime.cuda_stream import CudaStream
from dsc.runtime.device_arena import DeviceArena


@pytest.fixture
def stream(mock_library):
    return CudaStream(CudaDriver(library=mock_library))


def bytes_at(pool):
    """A pool's device memory, which is the host's."""
    n = int(np.prod(pool.shape)) * pool.dtype.itemsize
    return np.frombuffer((ctypes.c_char * n).from_address(pool.address), np.float32).reshape(pool.shape[1:])


def test_pools_lie_where_the_plan_says_and_start_as_zeros(stream):
    plan = toy_plan(max_length=20, draft_layers=2)
    arena = DeviceArena(plan, stream)
    zones = [arena.zone("target", 20), arena.zone("draft", 20)]
    base = zones[0].device_pools["k_pool.0"].address - plan.slot("target", 0, "k").offset
    assert base % 256 == 0
    for zone in zones:
        for name, pool in zone.device_pools.items():
            slot = plan.slot(zone.owner, int(name.partition(".")[2]), name[0])
            assert (pool.address - base, pool.shape) == (slot.offset, slot.shape)
            assert not bytes_at(pool).any()


def test_rejected_rows_stay_unless_rollback_is_secure(stream):
    for secure, left in ((False, 6), (True, 4)):
        zone = DeviceArena(toy_plan(max_length=20), stream, secure).zone("target", 20)
        pool = bytes_at(zone.device_pools["v_pool.0"])
        pool[:, :6] = 1
        zone.commit(written=6, kept=4)
        assert zone.length == 4
        assert pool.sum() == left


def test_a_write_past_a_zone_is_found(stream):
    plan = toy_plan(max_length=20)
    arena = DeviceArena(plan, stream)
    arena.check_guards()
    base = arena.zone("target", 20).device_pools["k_pool.0"].address - plan.slot("target", 0, "k").offset
    (ctypes.c_char).from_address(base + plan.zones[0].guard_offset + 3).value = b"x"
    with pytest.raises(PlanError, match=f"guard was overwritten at byte {plan.zones[0].guard_offset + 3}"):
        arena.check_guards()


def test_memory_stream_and_context_are_given_back_with_the_last_user(mock_library):
    mock = ctypes.CDLL(mock_library)
    before = mock.mock_allocated(), mock.mock_retained()
    driver = CudaDriver(library=mock_library)
    arena = DeviceArena(toy_plan(max_length=20), CudaStream(driver))
    zone = arena.zone("target", 20)
    assert (mock.mock_allocated(), mock.mock_retained()) == (before[0] + 1, before[1] + 1)
    del driver, arena, zone
    assert (mock.mock_allocated(), mock.mock_retained()) == before


def test_another_thread_may_use_the_stream(stream):
    arena = DeviceArena(toy_plan(max_length=20), stream)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(arena.check_guards).result()


def test_more_memory_than_the_device_has_is_refused_with_the_size(stream):
    plan = toy_plan(max_length=20).model_copy(update={"total_nbytes": 2**40})
    with pytest.raises(HostError, match=f"arena: {2**40} bytes of device memory are required: .*cuMemAlloc_v2 failed"):
        DeviceArena(plan, stream)
