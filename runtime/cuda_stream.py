"""One queue of work on a CUDA device, and the memory that it works on."""

from __future__ import annotations

from ctypes import byref, c_uint64, c_void_p
from typing import Any

from numpy.typing import NDArray

from dsc.runtime.cuda_driver import CudaDriver

_NON_BLOCKING = 1  # a stream that does not wait for the default stream


class CudaStream:
    """A stream that graphs, kernels and copies of one bundle share, so that each follows the one before.

    Only `synchronize` waits. Memory is freed and the stream destroyed when the object goes.

    Args:
        driver: the open device.

    Attributes:
        handle: as the driver and onnxruntime take it.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        self._memory: list[int] = []
        stream = c_void_p()
        driver.call("cuStreamCreate", byref(stream), _NON_BLOCKING)
        self.handle = int(stream.value or 0)

    def allocate(self, nbytes: int) -> int:
        """Address of new device memory; its bytes are zero for whatever is queued from now on.

        Raises:
            HostError: the device has not that much left.
        """
        address = c_uint64()
        self.driver.call("cuMemAlloc_v2", byref(address), nbytes)
        self._memory.append(address.value)
        self.fill(address.value, nbytes, 0)
        return address.value

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Queue setting bytes."""
        self.driver.call("cuMemsetD8Async", address, byte, nbytes, self.handle)

    def clear_rows(self, address: int, pitch: int, width: int, height: int) -> None:
        """Queue setting to zero: `height` pieces of `width` bytes, `pitch` bytes from one to the next."""
        self.driver.call("cuMemsetD2D8Async", address, pitch, 0, width, height, self.handle)

    def upload(self, address: int, array: NDArray[Any]) -> None:
        """Queue a copy to the device. `array` may be changed at once: the driver stages pageable memory first."""
        self.driver.call("cuMemcpyHtoDAsync_v2", address, array.ctypes.data, array.nbytes, self.handle)

    def download(self, array: NDArray[Any], address: int) -> None:
        """Copy from the device after all that is queued, and wait for it.

        Raises:
            HostError: something queued earlier failed.
        """
        self.driver.call("cuMemcpyDtoHAsync_v2", array.ctypes.data, address, array.nbytes, self.handle)
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until everything queued is done.

        Raises:
            HostError: something queued earlier failed.
        """
        self.driver.call("cuStreamSynchronize", self.handle)

    def __del__(self) -> None:
        for address in self._memory:
            self.driver.call("cuMemFree_v2", address)
        if getattr(self, "handle", 0):
            self.driver.call("cuStreamDestroy_v2", self.handle)
