"""One queue of work on a CUDA device, and the memory that it works on."""

from __future__ import annotations

from contextlib import suppress
from ctypes import byref, c_uint64, c_void_p
from typing import Any

from numpy.typing import NDArray

from dsc.bundle_schema.errors import HostError
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
        self.handle = 0
        self._memory: list[int] = []
        stream = c_void_p()
        self._call("cuStreamCreate", byref(stream), _NON_BLOCKING)
        self.handle = int(stream.value or 0)

    def allocate(self, nbytes: int) -> int:
        """Address of new device memory; its bytes are zero for whatever is queued from now on.

        Raises:
            HostError: the device has not that much left.
        """
        address = c_uint64()
        self._call("cuMemAlloc_v2", byref(address), nbytes)
        self._memory.append(address.value)
        self.fill(address.value, nbytes, 0)
        return address.value

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Queue setting bytes."""
        self._call("cuMemsetD8Async", address, byte, nbytes, self.handle)

    def clear_rows(self, address: int, pitch: int, width: int, height: int) -> None:
        """Queue setting to zero: `height` pieces of `width` bytes, `pitch` bytes from one to the next."""
        self._call("cuMemsetD2D8Async", address, pitch, 0, width, height, self.handle)

    def upload(self, address: int, array: NDArray[Any]) -> None:
        """Queue a copy to the device. `array` may be changed at once: the driver stages pageable memory first."""
        self._call("cuMemcpyHtoDAsync_v2", address, array.ctypes.data, array.nbytes, self.handle)

    def download(self, array: NDArray[Any], address: int) -> None:
        """Copy from the device after all that is queued, and wait for it.

        Raises:
            HostError: something queued earlier failed.
        """
        self._call("cuMemcpyDtoHAsync_v2", array.ctypes.data, address, array.nbytes, self.handle)
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until everything queued is done.

        Raises:
            HostError: something queued earlier failed.
        """
        self._call("cuStreamSynchronize", self.handle)

    def _call(self, name: str, *arguments: object) -> None:
        """Call the driver from whichever thread this is."""
        self.driver.make_current()
        self.driver.call(name, *arguments)

    def __del__(self) -> None:
        # At the end of the process the driver may have gone first, and has then taken everything with it.
        with suppress(HostError):
            for address in self._memory:
                self._call("cuMemFree_v2", address)
            if self.handle:
                self._call("cuStreamDestroy_v2", self.handle)
