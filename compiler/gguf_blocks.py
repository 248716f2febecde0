"""Carry the quantised blocks of a GGUF matrix into the BlockMatMul layout without quantising a second time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dsc.compiler.gguf_reader import GgufTensor

BLOCK = 32

Bytes = np.ndarray[Any, np.dtype[Any]]
Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True)
class BlockWeight:
    """A matrix of N rows and K columns in blocks of 32 columns: weight = scale (q - 2^(bits-1)) + min.

    Attributes:
        bits: 4 or 8.
        qweight: uint8 [N, K/32, 16 or 32], MatMulNBits' layout: at 4 bits element 2j is the low nibble of byte j.
        scales: float32 [N, K/32].
        mins: float32 [N, K/32], None when all are zero by construction.
        kind: the GGUF type it came from.
        exact: it holds the file's own codes, so that it differs from the file's values by rounding of fp32 only.
        max_error: the largest absolute difference from the file's values.
    """

    bits: int
    qweight: Bytes
    scales: Floats
    mins: Floats | None
    kind: str
    exact: bool
    max_error: float

    def dequantise(self) -> Floats:
        """The matrix, float32 [N, K]."""
        codes = _split_nibbles(self.qweight) if self.bits == 4 else self.qweight
        weight = codes.astype(np.float32)
        weight -= 2 ** (self.bits - 1)
        weight *= self.scales[..., None]
        if self.mins is not None:
            weight += self.mins[..., None]
        return weight.reshape(len(weight), -1)

    def take_rows(self, rows: np.ndarray[Any, np.dtype[np.int64]]) -> BlockWeight:
        """The matrix of these rows, in this order."""
        mins = None if self.mins is None else self.mins[rows]
        return replace(self, qweight=self.qweight[rows], scales=self.scales[rows], mins=mins)


@dataclass(frozen=True)
class _Codes:
    """weight = scale * (code + offset) + min over groups of `32` or `16` columns: codes [N, groups, width]."""

    codes: np.ndarray[Any, Any]
    scales: Floats
    mins: Floats | None = None
    offset: int = 0


def why_not_blocks(tensor: GgufTensor) -> str:
    """Why this tensor has to stay dense, empty when `block_weight` can carry it."""
    if len(tensor.shape) != 2:
        return f"{len(tensor.shape)} dimensions"
    if tensor.shape[1] % BLOCK:
        return f"{tensor.shape[1]} columns are not a multiple of {BLOCK}"
    if tensor.kind not in _UNPACK:
        return f"type {tensor.kind} has no block form"
    return ""


def block_weight(tensor: GgufTensor) -> BlockWeight:
    """The tensor's own blocks.

    Types with 32 columns a scale are carried exactly: Q4_0, Q4_1, Q4_K at 4 bits; Q5_0, Q5_1, Q5_K, Q8_0 at 8. Types
    with 16 columns a scale (Q2_K, Q3_K, Q6_K) do not fit: each pair of groups gets one scale and 8-bit codes, and
    `max_error` is what that costs.

    Raises:
        ValueError: `why_not_blocks` names a reason.
    """
    if reason := why_not_blocks(tensor):
        raise ValueError(f"{tensor.name}: {reason}")
    found = _UNPACK[tensor.kind](tensor)
    if found.codes.shape[-1] == BLOCK:
        return _exact(tensor.kind, found)
    return _best_fit(tensor.kind, found)


def _exact(kind: str, found: _Codes) -> BlockWeight:
    """The codes as they are: scale (q + offset) + min = scale (q' - half) + min', with integers moved into the codes
    where they fit and into the minimum where they do not.
    """
    bits = 4 if kind in ("Q4_0", "Q4_1", "Q4_K") else 8
    half = 2 ** (bits - 1)
    codes, mins = found.codes, found.mins
    if mins is None or bits == 8:
        codes = (codes.astype(np.int16) + (found.offset + half)).astype(np.uint8)
    else:
        mins = mins + np.float32(half) * found.scales
    packed = _join_nibbles(codes) if bits == 4 else codes
    block = BlockWeight(bits, np.ascontiguousarray(packed), found.scales, mins, kind, exact=True, max_error=0.0)
    return replace(block, max_error=_largest_rounding(found))


def _largest_rounding(found: _Codes) -> float:
    """A bound of the difference that comes from another order of the fp32 operations; 0 without minima."""
    if found.mins is None or not found.scales.size:
        return 0.0
    largest = float(np.max(np.abs(found.scales)) * 32 + np.max(np.abs(found.mins)))
    return largest * 2.0**-22


def _best_fit(kind: str, found: _Codes) -> BlockWeight:
    """One scale and, with minima, one minimum for each pair of groups of 16, codes of 8 bits."""
    values = found.scales[..., None] * (found.codes.astype(np.float32) + np.float32(found.offset))
    if found.mins is not None:
        values += found.mins[..., None]
    values = values.reshape(len(values), -1, BLOCK)
    mins: Floats | None = None
    if found.mins is None:
        scales = _refined_scales(found)
        codes = values
    else:
        low, high = values.min(axis=-1), values.max(axis=-1)
        mins, scales = (low + high) / 2, (high - low) / np.float32(254)
        codes = values - mins[..., None]
    codes = np.rint(codes / np.where(scales != 0, scales, np.float32(1))[..., None]) + 128
    qweight = np.clip(codes, 0, 255).astype(np.uint8)
    block = BlockWeight(8, qweight, scales, mins, kind, exact=False, max_error=0.0)
    error = float(np.abs(block.dequantise().reshape(values.shape) - values).max(initial=0.0))
    return replace(block, max_error=error)


def _refined_scales(found: _Codes) -> Floats:
    """For each pair of groups, the larger scale divided by what 8 bits leave over the type's own codes.

    The group that it belongs to stays exact, and the other's error is at most half a step: 1/8 of the larger scale in
    Q6_K, 1/64 in Q3_K.
    """
    pairs = found.scales.reshape(len(found.scales), -1, 2)
    larger = np.take_along_axis(pairs, np.abs(pairs).argmax(axis=-1, keepdims=True), axis=-1)[..., 0]
    return larger / np.float32(128 // -found.offset)


def _split_nibbles(packed: Bytes) -> Bytes:
    """[..., n] bytes to [..., 2n] codes, the low nibble first."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


def _join_nibbles(codes: Bytes) -> Bytes:
    joined: Bytes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return joined


def _halves(packed: Bytes) -> Bytes:
    """GGML's order: byte j holds element j in its low nibble and element j + n in its high one."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _blocks(tensor: GgufTensor, size: int) -> Bytes:
    """The file's blocks, uint8 [N, blocks of a row, size]."""
    return np.ascontiguousarray(tensor.data).view(np.uint8).reshape(tensor.shape[0], -1, size)


def _half_floats(blocks: Bytes, at: int) -> Floats:
    """The fp16 number at byte `at` of each block, as float32."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)


def _q4_0(tensor: GgufTensor) -> _Codes:
    blocks = _blocks(tensor, 18)
    return _Codes(_halves(blocks[..., 2:]), _half_floats(blocks, 0), offset=-8)


def _q4_1(tensor: GgufTensor) -> _Codes:
    blocks = _blocks(tensor, 20)
    return _Codes(_halves(blocks[..., 4:]), _half_floats(blocks, 0), _half_floats(blocks, 2))


def _fifth_bits(packed: Bytes) -> Bytes:
    """[..., 4] bytes to [..., 32] values 0 or 16, bit j of the little-endian word for element j."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << np.uint8(4)


def _q5_0(tensor: GgufTensor) -> _Codes:
    blocks = _blocks(tensor, 22)
    codes = _halves(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])
    return _Codes(codes, _half_floats(blocks, 0), offset=-16)


def _q5_1(tensor: GgufTensor) -> _Codes:
    blocks = _blocks(tensor, 24)
    codes = _halves(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return _Codes(codes, _half_floats(blocks, 0), _half_floats(blocks, 2))


def _q8_0(tensor: GgufTensor) -> _Codes:
    blocks = _blocks(tensor, 34)
    return _Codes(blocks[..., 2:].view(np.int8), _half_floats(blocks, 0))


def _per_group(codes: Bytes, scales: Floats, mins: Floats | None = None, offset: int = 0) -> _Codes:
    """Super-blocks [N, S, groups, width] as one row of groups."""
    rows = codes.shape[0]
    flat_mins = None if mins is None else mins.reshape(rows, -1)
    return _Codes(codes.reshape(rows, -1, codes.shape[-1]), scales.reshape(rows, -1), flat_mins, offset)


def _scales_and_mins(packed: Bytes) -> tuple[Floats, Floats]:
    """Eight 6-bit scales and minima from 12 bytes [..., 12], the packing of Q4_K and Q5_K."""
    low, mid, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=-1)
    mins = np.concatenate([mid & 63, (high >> 4) | ((mid >> 2) & 48)], axis=-1)
    return scales.astype(np.float32), mins.astype(np.float32)


def _q4_k(tensor: GgufTensor) -> _Codes:
    blocks = _blocks(tensor, 144)
    scales, mins = _scales_and_mins(blocks[..., 4:16])
    quads = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)
    codes = np.stack([quads & 15, quads >> 4], axis=-2).reshape(*blocks.shape[:2], 8, 32)
    return _per_group(codes, _half_floats(blocks, 0)[..., None] * scales, -_half_floats(blocks, 2)[..., None] * mins)


def _q5_k(tensor: GgufTensor) -> _Codes:
    blocks = _blocks(tensor, 176)
    scales, mins = _scales_and_mins(blocks[..., 4:16])
    quads = blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)
    codes = np.stack([quads & 15, quads >> 4], axis=-2).reshape(*blocks.shape[:2], 8, 32)
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    codes = codes | (((blocks[..., 16:48][..., None, :] >> shifts) & 1) << np.uint8(4))
    return _per_group(codes, _half_floats(blocks, 0)[..., None] * scales, -_half_floats(blocks, 2)[..., None] * mins)


def _two_bits(packed: Bytes) -> Bytes:
    """[..., 64] bytes to 16 groups of 16 two-bit codes, the packing of Q2_K and Q3_K."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    codes = (packed.reshape(*packed.shape[:-1], 2, 1, 32) >> shifts) & 3
    return codes.reshape(*packed.shape[:-1], 16, 16)


def _q2_k(tensor: GgufTensor) -> _Codes:
    blocks = _blocks(tensor, 84)
    packed = blocks[..., :16]
    scales = _half_floats(blocks, 80)[..., None] * (packed & 15).astype(np.float32)
    mins = -_half_floats(blocks, 82)[..., None] * (packed >> 4).astype(np.float32)
    return _per_group(_two_bits(blocks[..., 16:80]), scales, mins)


def _q3_k(tensor: GgufTensor) -> _Codes:
    blocks = _blocks(tensor, 110)
    packed = blocks[..., 96:108]
    low = np.concatenate([packed[..., :8] & 15, packed[..., :8] >> 4], axis=-1)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = ((packed[..., None, 8:] >> shifts) & 3).reshape(*packed.shape[:-1], 16)
    scales = (low | (high << np.uint8(4))).astype(np.float32) - 32
    third = (blocks[..., None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    codes = _two_bits(blocks[..., 32:96]) | (third.reshape(*blocks.shape[:2], 16, 16) << np.uint8(2))
    return _per_group(codes, _half_floats(blocks, 108)[..., None] * scales, offset=-4)


def _q6_k(tensor: GgufTensor) -> _Codes:
    blocks = _blocks(tensor, 210)
    shape = blocks.shape[:2]
    low = blocks[..., :128].reshape(*shape, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None]
    high = blocks[..., 128:192].reshape(*shape, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    codes = (low & 15).reshape(*shape, 8, 32) | ((high & 3).reshape(*shape, 8, 32) << np.uint8(4))
    scales = blocks[..., 192:208].view(np.int8).astype(np.float32)
    return _per_group(codes.reshape(*shape, 16, 16), _half_floats(blocks, 208)[..., None] * scales, offset=-32)


_UNPACK: dict[str, Callable[[GgufTensor], _Codes]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
