"""The layout of quantised matrices that the native kernels read: sixteen columns of a product side by side.

A column is a row of the stored matrix [N, K]. Of each block of 32 its bytes come in fours: four bytes of every one of
the sixteen columns in turn, then the next four. So eight columns fill a register, a lane each, and a row of activations
meets them without any shuffling. Where sixteen does not divide the number of columns, zeros fill up the last.
"""

from __future__ import annotations

import numpy as np

from dsc.kernels.contract import Array

COLUMNS = 16
_QUAD = 4  # bytes of a column in a row


def tiles_of(n: int) -> int:
    """How many times sixteen columns hold `n`."""
    return -(-n // COLUMNS)


def interleave_codes(qweight: Array) -> Array:
    """Codes uint8 [N, G, P] -> [ceil(N / 16), G, P / 4, 16, 4]."""
    n, groups, size = qweight.shape
    tiles = _filled(qweight).reshape(tiles_of(n), COLUMNS, groups, size // _QUAD, _QUAD)
    quads = np.ascontiguousarray(tiles).view(np.uint32)[..., 0]  # four bytes at once: several times faster
    return np.ascontiguousarray(quads.transpose(0, 2, 3, 1))[..., None].view(np.uint8)


def interleave_factors(factors: Array) -> Array:
    """Scales or minima [N, G] -> [ceil(N / 16), G, 16]."""
    n, groups = factors.shape
    return np.ascontiguousarray(_filled(factors).reshape(tiles_of(n), COLUMNS, groups).transpose(0, 2, 1))


def separate_codes(interleaved: Array, n: int) -> Array:
    """The inverse of `interleave_codes` for `n` columns."""
    tiles, groups, quads = interleaved.shape[:3]
    return interleaved.transpose(0, 3, 1, 2, 4).reshape(tiles * COLUMNS, groups, quads * _QUAD)[:n]


def separate_factors(interleaved: Array, n: int) -> Array:
    """The inverse of `interleave_factors` for `n` columns."""
    tiles, groups, _ = interleaved.shape
    return interleaved.transpose(0, 2, 1).reshape(tiles * COLUMNS, groups)[:n]


def _filled(rows: Array) -> Array:
    missing = tiles_of(len(rows)) * COLUMNS - len(rows)
    return np.pad(rows, [(0, missing), *[(0, 0)] * (rows.ndim - 1)]) if missing else rows


SEPARATION = """
  first = Constant <value_ints = [0]> ()
  rest = Constant <value_ints = [-1]> ()
  count = Constant <value_int: int = @N> ()
  columns = Reshape (count, rest)
  groups = Shape <start = 1, end = 2> (qweight)
  quads = Shape <start = 2, end = 3> (qweight)
  four = Constant <value_ints = [4]> ()
  bytes = Mul (quads, four)
  code_dims = Concat <axis = 0> (rest, groups, bytes)
  code_columns = Transpose <perm = [0, 3, 1, 2, 4]> (qweight)
  code_rows = Reshape (code_columns, code_dims)
  codes = Slice (code_rows, first, columns, first)
  factor_dims = Concat <axis = 0> (rest, groups)
  scale_columns = Transpose <perm = [0, 2, 1]> (scales)
  scale_rows = Reshape (scale_columns, factor_dims)
  factors = Slice (scale_rows, first, columns, first)
"""
"""`codes` [N, G, P] and `factors` [N, G] from `qweight` and `scales`: constants, so onnxruntime does it at load."""

MINS_SEPARATION = """
  min_columns = Transpose <perm = [0, 2, 1]> (mins)
  min_rows = Reshape (min_columns, factor_dims)
  minima = Slice (min_rows, first, columns, first)
"""
"""`minima` [N, G], after `SEPARATION`."""
