"""Attention by a bundle's own kernels inside the graph: which of them, for one model on one device."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from dsc.bundle_schema.errors import KernelError
from dsc.bundle_schema.model_info import ModelInfo
from dsc.bundle_schema.tensors import DType
from dsc.kernels.cuda_op import (
    JOIN_ARGS,
    MAX_HEAD_SIZES,
    MAX_TILES,
    NEW_ROWS,
    PAST_ROOM,
    TILED_ARGS,
    HeadKernels,
    Kernel,
    Table,
)
from dsc.kernels.launch_record import LaunchRecord
from dsc.runtime.cuda_stream import CudaStream
from dsc.runtime.device_kernels import DeviceKernels, attention_parts

ONNX_TYPES = {
    DType.FLOAT32: 1,
    DType.UINT8: 2,
    DType.INT8: 3,
    DType.INT32: 6,
    DType.INT64: 7,
    DType.FLOAT16: 10,
    DType.BFLOAT16: 16,
}
"""onnxruntime's numbers of element types."""

_TILED, _JOIN = "dspark_verify_head_tiled", "dspark_verify_join_parts"
_LONGEST = 1 << 30
_HALF = 2  # bytes of an element


class DeviceAttention:
    """The kernels that a model's attention layers launch, loaded, with their scratch memory.

    Args:
        kernels: the bundle's.
        stream: of the graph.
        info: the model; `kv_dtype` is that of its CUDA graph.

    Attributes:
        table: for the library.
        total_length: int32 scalar that must hold the longest sequence's rows after the coming run.

    Raises:
        KernelError: no kernel of the bundle serves the model on this device; every reason is named.
    """

    def __init__(self, kernels: DeviceKernels, stream: CudaStream, info: ModelInfo) -> None:
        self._kernels = kernels
        self.stream = stream
        self.total_length = np.zeros((), np.int32)
        head_sizes = sorted({layer.head_dim for layer in info.kv_layers})
        if len(head_sizes) > MAX_HEAD_SIZES:
            raise KernelError(_TILED, f"at most {MAX_HEAD_SIZES} head sizes are possible, got {len(head_sizes)}")
        softcap = self._softcap(head_sizes[0], info.kv_dtype)
        heads = [self._head(size, info.kv_dtype, softcap) for size in head_sizes]
        multiprocessors = kernels.driver.device.multiprocessors
        parts = max(attention_parts(layer.n_kv_heads, _LONGEST, multiprocessors) for layer in info.kv_layers)
        capacity = info.n_heads * NEW_ROWS * parts
        self.table = Table(
            launch=kernels.driver.address("cuLaunchKernel"),
            copy=kernels.driver.address("cuMemcpy2DAsync_v2"),
            set=kernels.driver.address("cuMemsetD32Async"),
            parts=stream.allocate(4 * capacity * head_sizes[-1]),
            stats=stream.allocate(8 * capacity),
            piece=stream.allocate(PAST_ROOM + NEW_ROWS * _row_nbytes(info)),
            capacity=capacity,
            element_type=ONNX_TYPES[info.kv_dtype],
            softcap=softcap,
            multiprocessors=multiprocessors,
            n_head_sizes=len(heads),
            length=self.total_length.ctypes.data,
            heads=(HeadKernels * MAX_HEAD_SIZES)(*heads),
        )

    def _softcap(self, head_size: int, dtype: DType) -> int:
        """Whether the bundle's kernels bend their scores: it has those that its model needs."""
        try:
            self._kernels.choice.choose(_TILED, _axes(head_size, dtype, 0))
        except KernelError:
            return 1
        return 0

    def _head(self, head_size: int, dtype: DType, softcap: int) -> HeadKernels:
        axes = _axes(head_size, dtype, softcap)
        tiles: list[Kernel] = []
        packed: int | None = 1
        while packed is not None and len(tiles) < MAX_TILES:
            record = self._kernels.choice.choose(_TILED, {**axes, "packed_rows": packed})
            limit = record.at_most.get("packed_rows")
            tiles.append(self._load(record, TILED_ARGS, int(record.constants["BLOCK_M"]), limit or 0))
            packed = None if limit is None else limit + 1
        join = self._load(self._kernels.choice.choose(_JOIN, axes), JOIN_ARGS, 1, 0)
        return HeadKernels(head_size, len(tiles), (Kernel * MAX_TILES)(*tiles), join)

    def _load(self, record: LaunchRecord, names: tuple[str, ...], rows: int, most_packed: int) -> Kernel:
        found = tuple(arg.name for arg in record.args)
        if found != names:
            raise KernelError(record.variant, f"the library passes {', '.join(names)}, it takes {', '.join(found)}")
        function = self._kernels.load(record).function
        return Kernel(ctypes.c_void_p(function), record.threads, record.shared, rows, most_packed)


def _row_nbytes(info: ModelInfo) -> int:
    """Bytes of one row of queries, outputs, keys and values of the layer that has most."""
    return max(_HALF * layer.head_dim * 2 * (info.n_heads + layer.n_kv_heads) for layer in info.kv_layers)


def _axes(head_size: int, dtype: DType, softcap: int) -> Mapping[str, int | str]:
    """A launch of one sequence."""
    sizes = {"batch": 1, "rows": 1, "kv_heads": 1, "q_heads": 1, "packed_rows": 1, "parts": 1, "head_size": head_size}
    return {**sizes, "dtype": dtype.value, "pool_dtype": dtype.value, "softcap": softcap}
