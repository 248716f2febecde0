"""The kernels of the present sources on the GPU of this machine, compiled for it; for tests marked ``gpu``."""

from __future__ import annotations

import functools

from dsc.compiler.kernel_bench import open_device
from dsc.runtime.cuda_stream import CudaStream
from dsc.runtime.device_kernels import DeviceKernels

_BUSY_CYCLES = 200_000_000  # a tenth of a second: longer than the host takes for any round of a tiny model


@functools.cache
def open_kernels() -> DeviceKernels:
    """Every declared variant for the device; compiled where the cache has it not.

    Raises:
        HostError: there is no GPU, or torch has no CUDA.
    """
    return open_device()


class BusyStream:
    """Makes a stream's device busy, so that a host that waits for it is found out."""

    def __init__(self, stream: CudaStream) -> None:
        import torch

        self._stream = torch.cuda.ExternalStream(stream.handle)
        self._done = torch.cuda.Event()

    def keep_busy(self) -> None:
        """Queue a tenth of a second of nothing."""
        import torch

        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(_BUSY_CYCLES)
            self._done.record()

    def is_busy(self) -> bool:
        """Whether what was queued last still runs, or has not begun."""
        return not self._done.query()
