"""The kernels of the present sources on the GPU of this machine, compiled for it; for tests marked ``gpu``."""

from __future__ import annotations

import functools

from dsc.compiler.kernel_bench import open_device
from dsc.runtime.device_kernels import DeviceKernels


@functools.cache
def open_kernels() -> DeviceKernels:
    """Every declared variant for the device; compiled where the cache has it not.

    Raises:
        HostError: there is no GPU, or torch has no CUDA.
    """
    return open_device()
