"""Memory, streams and compiled kernels through the CUDA driver library alone: no Triton, torch or CUDA toolkit.

Everything lives in the device's primary context, which is the one that onnxruntime's CUDA provider uses, so device
pointers and streams can be passed either way as they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from ctypes import byref, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from typing import Any

from dsc.bundle_schema.errors import HostError, KernelError
from dsc.kernels.launch_record import LaunchRecord
from dsc.runtime.kernel_choice import CudaDevice

_MULTIPROCESSORS, _MAJOR, _MINOR, _SHARED_OPTIN = 16, 75, 76, 97
_MAX_DYNAMIC_SHARED = 8
_STATIC_SHARED_LIMIT = 48 * 1024
_CELLS = {"i32": c_int32, "u32": c_uint, "i64": c_int64, "u64": c_uint64, "fp32": c_float}
_SIGNATURES = {
    "cuInit": [c_uint],
    "cuDriverGetVersion": [c_void_p],
    "cuDeviceGet": [c_void_p, c_int],
    "cuDeviceGetName": [c_char_p, c_int, c_int],
    "cuDeviceTotalMem_v2": [c_void_p, c_int],
    "cuDeviceGetAttribute": [c_void_p, c_int, c_int],
    "cuDevicePrimaryCtxRetain": [c_void_p, c_int],
    "cuDevicePrimaryCtxRelease_v2": [c_int],
    "cuCtxSetCurrent": [c_void_p],
    "cuStreamCreate": [c_void_p, c_uint],
    "cuStreamDestroy_v2": [c_void_p],
    "cuStreamSynchronize": [c_void_p],
    "cuMemAlloc_v2": [c_void_p, c_size_t],
    "cuMemFree_v2": [c_uint64],
    "cuMemsetD8Async": [c_uint64, c_ubyte, c_size_t, c_void_p],
    "cuMemsetD2D8Async": [c_uint64, c_size_t, c_ubyte, c_size_t, c_size_t, c_void_p],
    "cuMemsetD32Async": [c_uint64, c_uint, c_size_t, c_void_p],
    "cuMemcpyHtoDAsync_v2": [c_uint64, c_void_p, c_size_t, c_void_p],
    "cuMemcpyDtoHAsync_v2": [c_void_p, c_uint64, c_size_t, c_void_p],
    "cuMemcpy2DAsync_v2": [c_void_p, c_void_p],
    "cuModuleLoadData": [c_void_p, c_char_p],
    "cuModuleUnload": [c_void_p],
    "cuModuleGetFunction": [c_void_p, c_void_p, c_char_p],
    "cuFuncSetAttribute": [c_void_p, c_int, c_int],
    "cuLaunchKernel": [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p],
    "cuGetErrorString": [c_int, c_void_p],
}


class CudaDriver:
    """One device of the CUDA driver with its primary context retained; `close` or a ``with`` block releases it.

    Args:
        ordinal: which device.
        library: file name of the driver library.

    Raises:
        HostError: there is no driver, it is too old, or it has no such device.
    """

    def __init__(self, ordinal: int = 0, library: str = "libcuda.so.1") -> None:
        self._library = library
        self.ordinal = ordinal
        self._cuda = self._open(library)
        self.call("cuInit", 0)
        self._handle = c_int()
        self.call("cuDeviceGet", byref(self._handle), ordinal)
        self.device = self._describe()
        self._context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(self._context), self._handle)
        self._modules: dict[str, c_void_p] = {}
        self.make_current()

    def _open(self, library: str) -> ctypes.CDLL:
        try:
            cuda = ctypes.CDLL(library)
            for name, types in _SIGNATURES.items():
                getattr(cuda, name).argtypes = types
        except OSError as error:
            hint = "run on a machine with an NVIDIA driver, or with provider='cpu'"
            raise HostError(library, f"the CUDA driver library cannot be loaded: {error}", hint) from error
        except AttributeError as error:
            raise HostError(library, f"is not a usable CUDA driver library: {error}", "update the driver") from error
        return cuda

    def call(self, name: str, *arguments: object) -> None:
        """Call a driver function.

        Raises:
            HostError: it returns an error code.
        """
        code = getattr(self._cuda, name)(*arguments)
        if code:
            text = c_char_p()
            self._cuda.cuGetErrorString(code, byref(text))
            raise HostError(self._library, f"{name} failed with code {code}: {(text.value or b'unknown').decode()}")

    def _attribute(self, number: int) -> int:
        value = c_int()
        self.call("cuDeviceGetAttribute", byref(value), number, self._handle)
        return value.value

    def _describe(self) -> CudaDevice:
        version, name = c_int(), ctypes.create_string_buffer(256)
        self.call("cuDriverGetVersion", byref(version))
        self.call("cuDeviceGetName", name, len(name), self._handle)
        return CudaDevice(
            name=name.value.decode(errors="replace"),
            capability=(self._attribute(_MAJOR), self._attribute(_MINOR)),
            multiprocessors=self._attribute(_MULTIPROCESSORS),
            shared_per_block=self._attribute(_SHARED_OPTIN),
            driver=version.value,
        )

    def total_memory(self) -> int:
        """Bytes of the device's memory."""
        total = c_size_t()
        self.call("cuDeviceTotalMem_v2", byref(total), self._handle)
        return total.value

    def make_current(self) -> None:
        """Make the primary context current in the calling thread; each launching thread does it once."""
        self.call("cuCtxSetCurrent", self._context)

    def address(self, name: str) -> int:
        """Of a function of the driver, for native code."""
        return ctypes.cast(getattr(self._cuda, name), c_void_p).value or 0

    def prepare(self, record: LaunchRecord, code: bytes) -> PreparedLaunch:
        """Load a kernel (once per image) and set up its argument block.

        Raises:
            HostError: the driver refuses the image.
            KernelError: an argument type has no counterpart here.
        """
        self.make_current()
        module = self._modules.get(record.sha256)
        if module is None:
            module = c_void_p()
            self.call("cuModuleLoadData", byref(module), code)
            self._modules[record.sha256] = module
        function = c_void_p()
        self.call("cuModuleGetFunction", byref(function), module, record.entry.encode())
        if record.shared > _STATIC_SHARED_LIMIT:
            self.call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, record.shared)
        return PreparedLaunch(self._cuda.cuLaunchKernel, function, record)

    def close(self) -> None:
        """Unload every kernel and give the context back."""
        for module in self._modules.values():
            self.call("cuModuleUnload", module)
        self._modules.clear()
        if self._context:
            self.call("cuDevicePrimaryCtxRelease_v2", self._handle)
            self._context = c_void_p()

    def __del__(self) -> None:
        # At the end of the process the driver may have gone first, and has then taken everything with it.
        with suppress(HostError):
            if getattr(self, "_context", None):
                self.close()

    def __enter__(self) -> CudaDriver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PreparedLaunch:
    """A loaded kernel with its argument block; calling it queues one launch on a stream.

    Not thread-safe: the argument block is reused. The driver copies it during the call.

    Attributes:
        function: the driver's handle.
    """

    def __init__(self, launch: ctypes._NamedFuncPointer, function: c_void_p, record: LaunchRecord) -> None:
        self.record = record
        self.function = function.value or 0
        self._launch = launch
        unknown = [arg for arg in record.args if not arg.is_pointer and arg.type not in _CELLS]
        if unknown:
            raise KernelError(record.variant, f"argument {unknown[0].name} has the unknown type {unknown[0].type}")
        self._cells: list[Any] = [c_uint64() if arg.is_pointer else _CELLS[arg.type]() for arg in record.args]
        # The two hidden parameters at the end, global and profile scratch, are null pointers.
        cells = [*self._cells, c_uint64(0), c_uint64(0)]
        self._block = (c_void_p * len(cells))(*[ctypes.addressof(cell) for cell in cells])
        self._keep = cells
        self._aligned = [i for i, arg in enumerate(record.args) if arg.name in record.divisible_by_16]

    def __call__(self, blocks: tuple[int, int, int], stream: int, values: Sequence[int | float]) -> None:
        """Queue one launch; does not wait.

        Args:
            blocks: the grid, from `LaunchRecord.blocks`.
            stream: handle of a CUDA stream; 0 is the default stream.
            values: one for each argument of the record, device addresses for pointers.

        Raises:
            KernelError: the number of values or an alignment is wrong, or the driver refuses the launch.
        """
        record = self.record
        if len(values) != len(self._cells):
            raise KernelError(record.variant, f"takes {len(self._cells)} arguments, got {len(values)}")
        for i in self._aligned:
            if int(values[i]) & 15:
                raise KernelError(record.variant, f"{record.args[i].name} must be a multiple of 16, got {values[i]}")
        for cell, value in zip(self._cells, values, strict=True):
            cell.value = value
        threads = record.num_warps * record.warp_size
        code = self._launch(self.function, *blocks, threads, 1, 1, record.shared, stream, self._block, None)
        if code:
            raise KernelError(record.variant, f"the driver refused the launch {blocks} with code {code}")
