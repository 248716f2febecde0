"""Float matrices in half their room, without a loss: a 16-bit number for each weight, a scale for each block of 32.

A block of a quantised checkpoint stands for multiples of one number: 8-bit codes ``d * q`` lie on a grid of 2^8 steps,
4-bit codes ``d * q + m`` with d and m in half precision on one of 2^16 unless m is much larger than d. So the floats
of such a checkpoint are, as a rule, 16-bit numbers times a scale, exactly but for the sign of zeros, which no sum of
products shows. The floats alone tell whether they are, wherever they come from.

Layout: eight numbers of a column and eight of the next in turn, a column being a row of the matrix [N, K]; where the
number of columns is odd, zeros fill up the last pair.
"""

from __future__ import annotations

import numpy as np

from dsc.kernels.block_matmul import BLOCK
from dsc.kernels.contract import Array

_LANES = 8
_LARGEST = 2**15 - 1
_CHUNK = 1 << 15  # blocks at a time, so that what is held besides the matrix stays small
_SMALLEST = np.float32(2.0**-126)  # smaller scales would lose bits


def exact_scales(weight: Array) -> Array | None:
    """Scales [N, K / 32] such that every weight [N, K] is one of them times a 16-bit number; None when there are none.

    The scale of a block is the greatest power of two that divides all of its weights; where 16 bits do not count so
    far, the greatest number that does.
    """
    n, k = weight.shape
    if k % BLOCK or not n * k:
        return None
    blocks = weight.reshape(-1, BLOCK)
    scales = np.empty(len(blocks), np.float32)
    start, size = 0, 64  # most matrices that are none show it at once
    while start < len(blocks):
        found = _divisors(blocks[start : start + size])
        if found is None:
            return None
        scales[start : start + size] = found
        start, size = start + size, _CHUNK
    return scales.reshape(n, k // BLOCK)


def _divisors(blocks: Array) -> Array | None:
    """As `exact_scales`, of float32 [B, 32] -> [B]."""
    bits = blocks.view(np.uint32)
    exponents = (bits >> 23 & 0xFF).astype(np.int32)
    numbers = bits & 0x7FFFFF
    if (exponents == 0xFF).any() or (numbers[exponents == 0] != 0).any():  # infinite, no number, subnormal
        return None
    numbers |= np.uint32(1 << 23)
    used = exponents > 0
    # a weight is numbers * 2^(exponents - 150); its lowest bit decides on which powers of two it lies
    low = (numbers & -numbers).astype(np.float32).view(np.uint32) >> 23
    grid = np.where(used, exponents + low.astype(np.int32) - 127, 1 << 9).min(axis=1)
    grid = np.where(used.any(axis=1), grid, 150)
    steps = np.abs(np.ldexp(blocks.astype(np.float64), (150 - grid)[:, None]))
    scales = np.ldexp(1.0, grid - 150)
    wide = np.flatnonzero(steps.max(axis=1) > _LARGEST)
    if len(wide):
        whole = steps[wide]
        if whole.max() >= 2.0**53:
            return None
        divisor = np.gcd.reduce(whole.astype(np.int64), axis=1)
        if (whole.max(axis=1) > _LARGEST * divisor).any():
            return None
        scales[wide] *= divisor
    return None if (scales < _SMALLEST).any() else scales.astype(np.float32)


def pack_codes(weight: Array, scales: Array) -> Array:
    """Weights [N, K] over their scales [N, K / 32], as int16 [ceil(N / 2), K / 8, 2, 8]."""
    n, k = weight.shape
    codes = (weight.reshape(n, -1, BLOCK) / scales[..., None]).astype(np.int16).reshape(n, k // _LANES, _LANES)
    pairs = _filled(codes).reshape(-1, 2, k // _LANES, _LANES)
    return np.ascontiguousarray(pairs.transpose(0, 2, 1, 3))


def pack_scales(scales: Array) -> Array:
    """Scales [N, G] -> [ceil(N / 2), G, 2]."""
    return np.ascontiguousarray(_filled(scales).reshape(-1, 2, scales.shape[1]).transpose(0, 2, 1))


def unpack(codes: Array, scales: Array, n: int) -> Array:
    """The float32 weights [n, K] of packed codes and scales."""
    pairs, eights = codes.shape[:2]
    blocks = codes.transpose(0, 2, 1, 3).reshape(2 * pairs, -1, BLOCK).astype(np.float32)
    factors = scales.transpose(0, 2, 1).reshape(2 * pairs, -1, 1)
    weights: Array = (blocks * factors).reshape(2 * pairs, eights * _LANES)[:n]
    return weights


def _filled(rows: Array) -> Array:
    return np.concatenate([rows, np.zeros_like(rows[:1])]) if len(rows) % 2 else rows


UNPACKING = """
  first = Constant <value_ints = [0]> ()
  rest = Constant <value_ints = [-1]> ()
  one = Constant <value_ints = [1]> ()
  inner = Constant <value_int: int = @K> ()
  width = Reshape (inner, rest)
  count = Constant <value_int: int = @N> ()
  columns = Reshape (count, rest)
  groups = Shape <start = 1, end = 2> (scales)
  size = Constant <value_ints = [32]> ()
  code_columns = Transpose <perm = [0, 2, 1, 3]> (codes)
  block_dims = Concat <axis = 0> (rest, groups, size)
  code_blocks = Reshape (code_columns, block_dims)
  steps = Cast <to = 1> (code_blocks)
  scale_columns = Transpose <perm = [0, 2, 1]> (scales)
  factor_dims = Concat <axis = 0> (rest, groups, one)
  factors = Reshape (scale_columns, factor_dims)
  blocks = Mul (steps, factors)
  row_dims = Concat <axis = 0> (rest, width)
  rows = Reshape (blocks, row_dims)
  weight = Slice (rows, first, columns, first)
"""
"""`weight` [N, K] from `codes` and `scales`, in a function's text: constants, so onnxruntime does it at load."""
