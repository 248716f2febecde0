"""All keys and values of a bundle in one allocation on a CUDA device, cut by its KV plan."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from dsc.bundle_schema.errors import HostError, PlanError
from dsc.bundle_schema.kv_plan import KvPlan, KvSlot, Owner
from dsc.bundle_schema.tensors import DType
from dsc.runtime.cuda_stream import CudaStream
from dsc.runtime.kv_arena import KvZone

_GUARD_BYTE = 0xA5


@dataclass(frozen=True)
class DevicePool:
    """Keys or values of one layer and one sequence: [1, Hkv, rows, D] at a device address."""

    address: int
    dtype: DType
    shape: tuple[int, int, int, int]


class DeviceZone(KvZone):
    """A `KvZone` whose rows lie on a device.

    Args:
        device_pools: graph input name -> where it lies.
        eraser: the stream that overwrites rejected rows with zeros; None leaves them.
    """

    def __init__(
        self,
        owner: Owner,
        device_pools: dict[str, DevicePool],
        capacity: int,
        eraser: CudaStream | None,
    ) -> None:
        super().__init__(owner, {}, capacity)
        self.device_pools = device_pools
        self._eraser = eraser

    def _reject(self, start: int, end: int) -> None:
        super()._reject(start, end)
        if self._eraser is not None and start < end:
            self._erase(self._eraser, start, end)

    def _erase(self, stream: CudaStream, start: int, end: int) -> None:
        for pool in self.device_pools.values():
            _, n_heads, rows, head_dim = pool.shape
            row_nbytes = head_dim * pool.dtype.itemsize
            address = pool.address + start * row_nbytes
            stream.clear_rows(address, rows * row_nbytes, (end - start) * row_nbytes, n_heads)


class DeviceArena:
    """The memory behind a `KvPlan` on a device, zero at first.

    Args:
        plan: a checked plan without rings.
        stream: does what is written here.
        secure_rollback: zones overwrite rejected rows with zeros.

    Raises:
        HostError: the device has not that much memory left.
    """

    def __init__(self, plan: KvPlan, stream: CudaStream, secure_rollback: bool = False) -> None:
        self.plan = plan
        self.nbytes = max(plan.total_nbytes, 1)
        self._stream = stream
        self._eraser = stream if secure_rollback else None
        try:
            self._address = stream.allocate(self.nbytes)
        except HostError as error:
            raise HostError("arena", f"{self.nbytes} bytes of device memory are required: {error}") from error
        for zone in plan.zones:
            stream.fill(self._address + zone.guard_offset, zone.guard_nbytes, _GUARD_BYTE)

    def zone(self, owner: Owner, capacity: int, slot: int = 0) -> DeviceZone:
        """The zone of `owner` for the sequence in `slot`, empty, with room for `capacity` valid rows."""
        slots = [item for item in self.plan.slots if item.owner == owner]
        pools = {f"{item.role}_pool.{item.layer}": self._pool(item, slot) for item in slots}
        return DeviceZone(owner, pools, capacity, self._eraser)

    def _pool(self, item: KvSlot, slot: int) -> DevicePool:
        _, n_heads, rows, head_dim = item.shape
        start = slot * prod(item.shape[1:]) * item.dtype.itemsize
        return DevicePool(self._address + item.offset + start, item.dtype, (1, n_heads, rows, head_dim))

    def check_guards(self) -> None:
        """Look for writes past the end of a zone; waits for the device.

        Raises:
            PlanError: names the zone and the first byte that was overwritten.
        """
        for zone in self.plan.zones:
            guard = np.empty(zone.guard_nbytes, np.uint8)
            self._stream.download(guard, self._address + zone.guard_offset)
            hit = np.flatnonzero(guard != _GUARD_BYTE)
            if hit.size:
                where = zone.guard_offset + int(hit[0])
                raise PlanError(f"{zone.name} zone", f"its guard was overwritten at byte {where}")
