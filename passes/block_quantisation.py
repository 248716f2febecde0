"""Weights as blocks of small integers with one scale each: the layout of MatMulNBits and BlockMatMul."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

_CHUNK_ELEMENTS = 1 << 20
"""How much is rounded at a time: temporaries stay in the cache, and out of the peak memory."""

FloatArray = npt.NDArray[np.float32]
ByteArray = npt.NDArray[np.uint8]


class BlockWeights(Protocol):
    """A matrix [N, K] that is already blocks: what a GGUF importer carries over.

    ``w = scale * (q - 2^(bits-1)) + min``, blocks of 32 along K; `mins` is None when every minimum is zero.
    """

    @property
    def bits(self) -> int: ...  # noqa: D102
    @property
    def qweight(self) -> ByteArray: ...  # noqa: D102
    @property
    def scales(self) -> FloatArray: ...  # noqa: D102
    @property
    def mins(self) -> FloatArray | None: ...  # noqa: D102


@dataclass(frozen=True)
class Blocks:
    """A quantised matrix [N, K].

    Attributes:
        qweight: uint8 [N, K/block, block * bits / 8]; with 4 bits element 2j is the low half of byte j.
        scales: float32 [N, K/block].
        mins: float32 [N, K/block], None when all are zero.
    """

    bits: int
    qweight: ByteArray
    scales: FloatArray
    mins: FloatArray | None = None


def quantise_symmetric(rows: npt.NDArray[Any], bits: int, block: int) -> Blocks:
    """Round `rows` [N, K] to the nearest multiples of a scale per block.

    The scale puts the block's largest magnitude, with its sign, on the lowest integer -2^(bits-1), so the whole
    range is used (the rule of GGUF's Q4_0); a block of zeros has scale 0.
    """
    n, k = rows.shape
    qweight = np.empty((n, k // block, block * bits // 8), np.uint8)
    scales = np.empty((n, k // block), np.float32)
    step = max(1, _CHUNK_ELEMENTS // k)
    for start in range(0, n, step):
        part = slice(start, start + step)
        values = np.asarray(rows[part], np.float32).reshape(-1, k // block, block)
        integers, scales[part] = _round(values, 2 ** (bits - 1))
        qweight[part] = pack(integers, bits)
    return Blocks(bits, qweight, scales)


def _round(values: FloatArray, lowest: int) -> tuple[ByteArray, FloatArray]:
    """Integers [rows, blocks, block] and scales [rows, blocks] of a chunk."""
    top, bottom = values.max(-1), values.min(-1)
    scales = np.where(top > -bottom, top, bottom) / np.float32(-lowest)
    inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales != 0)
    integers = values * inverse[..., None]
    np.rint(integers, out=integers)
    integers += np.float32(lowest)
    np.clip(integers, 0, 2 * lowest - 1, out=integers)
    return integers.astype(np.uint8), scales


def pack(integers: ByteArray, bits: int) -> ByteArray:
    """uint8 [..., block] as bytes [..., block * bits / 8]."""
    if bits == 8:
        return integers
    return (integers[..., 0::2] | (integers[..., 1::2] << 4)).astype(np.uint8)


def dequantise(blocks: BlockWeights | Blocks) -> FloatArray:
    """The matrix [N, K] that the blocks stand for."""
    packed = blocks.qweight
    if blocks.bits == 4:
        packed = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    values: FloatArray = blocks.scales[..., None] * (packed.astype(np.float32) - 2 ** (blocks.bits - 1))
    if blocks.mins is not None:
        values = values + blocks.mins[..., None]
    return np.asarray(values.reshape(values.shape[0], -1), np.float32)
