"""`BlockMatMul`: activations times a weight stored as 4- or 8-bit codes in blocks of 32 with a scale each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dsc.kernels.contract import Array, Axes, KernelContract, TensorRole
from dsc.kernels.function_text import function_by_mins, parse_function

if TYPE_CHECKING:
    import onnx_ir as ir

BLOCK = 32


def unpack_codes(qweight: Array, bits: int) -> Array:
    """Codes uint8 [N, K / 32, 32]: of two 4-bit codes in a byte the low nibble comes first."""
    if bits == 8:
        return qweight
    return np.stack([qweight & 15, qweight >> 4], axis=-1).reshape(*qweight.shape[:2], BLOCK)


def dequantise(qweight: Array, scales: Array, mins: Array | None, bits: int) -> Array:
    """The weight float32 [N, K]: ``scale * (code - 2^(bits-1)) + min``."""
    centred = unpack_codes(qweight, bits).astype(np.float32) - 2.0 ** (bits - 1)
    weight = centred * scales[..., None]
    if mins is not None:
        weight = weight + mins[..., None]
    return weight.reshape(weight.shape[0], -1)


def quantise_activations(x: Array) -> tuple[Array, Array]:
    """Each row in blocks of 32 as int8 codes [.., K / 32, 32] and scales ``max |x| / 127`` [.., K / 32].

    Codes are rounded to the nearest, ties to even, so a row's result never depends on the other rows.
    """
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, BLOCK)
    largest = np.abs(blocks).max(axis=-1)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 1e-30)
    codes = np.rint(blocks * inverse[..., None]).astype(np.int32)
    return codes, largest / np.float32(127)


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """y [.., N] = x [.., K] weight^T with x quantised to int8 per row and block of 32.

    The minima, where given, meet the unquantised block sums of x.
    """
    x, qweight, scales = inputs["x"], inputs["qweight"], inputs["scales"].astype(np.float64)
    bits = attributes.get("bits", 4 if qweight.shape[2] * 2 == BLOCK else 8)
    codes, x_scales = quantise_activations(x)
    centred = unpack_codes(qweight, bits).astype(np.int32) - (1 << (bits - 1))
    products = np.einsum("...gk,ngk->...ng", codes, centred)  # exact integers
    y = (products * scales * x_scales[..., None, :]).sum(axis=-1)
    if "mins" in inputs:
        sums = x.astype(np.float64).reshape(*x.shape[:-1], -1, BLOCK).sum(axis=-1)
        y = y + sums @ inputs["mins"].astype(np.float64).T
    return {"y": y.astype(np.float32)}


def make_inputs(axes: Axes, seed: int) -> dict[str, Array]:
    """Random 4-bit blocks with minima and activations that differ in size from row to row."""
    return make_bits_inputs(axes, seed, bits=4)


def make_bits_inputs(axes: Axes, seed: int, bits: int) -> dict[str, Array]:
    """As `make_inputs`, for 4 or 8 bits."""
    rng = np.random.default_rng(seed)
    n, blocks = axes["N"], axes["G"]
    size = rng.uniform(0.1, 10, (axes["M"], 1)).astype(np.float32)
    return {
        "x": rng.standard_normal((axes["M"], blocks * BLOCK), dtype=np.float32) * size,
        "qweight": rng.integers(0, 256, (n, blocks, BLOCK * bits // 8), dtype=np.uint8),
        "scales": rng.uniform(0.01, 0.1, (n, blocks)).astype(np.float32),
        "mins": rng.normal(0, 0.1, (n, blocks)).astype(np.float32),
    }


def _nbytes(axes: Axes) -> int:
    return axes["N"] * axes["G"] * (BLOCK // 2 + 8) + 4 * axes["M"] * (axes["G"] * BLOCK + axes["N"])


def _flops(axes: Axes) -> int:
    return 2 * axes["M"] * axes["N"] * axes["G"] * BLOCK


BLOCK_MATMUL = KernelContract(
    name="BlockMatMul",
    axes={
        "M": "rows of activations",
        "G": "blocks of 32 along the inner axis",
        "K": "inner size, 32 G",
        "N": "columns of the output",
        "P": "bytes of a block, 16 or 32",
    },
    inputs=(
        TensorRole("x", ("M", "K"), "float32"),
        TensorRole("qweight", ("N", "G", "P"), "uint8"),
        TensorRole("scales", ("N", "G"), "float32"),
        TensorRole("mins", ("N", "G"), "float32", optional=True),
    ),
    outputs=(TensorRole("y", ("M", "N"), "float32"),),
    attributes={"bits": "4 or 8", "K": "inner size", "N": "columns", "block": "32"},
    reference=reference,
    make_inputs=make_inputs,
    nbytes=_nbytes,
    flops=_flops,
    example={"M": 3, "G": 5, "K": 160, "N": 37, "P": 16},
    # onnxruntime quantises the activations only where it may repack a constant weight, and then with roundings
    # of its own; elsewhere it keeps them in float. Half a code of 254 is the bound between the two.
    tolerances={"float32": 1.6e-2},
)


def product_text(codes: str, scales: str, mins: str | None) -> str:
    """Nodes that give `y` from `x` and blocks by rows; the arguments are names of values."""
    product = f"""com.microsoft.MatMulNBits <bits: int = @bits, K: int = @K, N: int = @N, block_size: int = @block,
      accuracy_level = 4> (x, {codes}, {scales})"""
    if mins is None:
        return f"y = {product}"
    return f"""
  main = {product}
  rows = Shape <start = 0, end = -1> (x)
  size = Constant <value_int: int = @block> ()
  last = Constant <value_ints = [-1]> ()
  size1 = Reshape (size, last)
  blocks = Concat <axis = 0> (rows, last, size1)
  split = Reshape (x, blocks)
  sums = ReduceSum <keepdims = 0> (split, last)
  shift = com.microsoft.FusedMatMul <transB = 1> (sums, {mins})
  y = Add (main, shift)
"""


def function_body(has_mins: bool = False) -> ir.Function:
    """The operator as onnxruntime's MatMulNBits, plus a product of block sums when there are minima."""
    mins = "mins" if has_mins else None
    inputs = ", ".join(name for name in ("x", "qweight", "scales", mins) if name)
    body = product_text("qweight", "scales", mins)
    return parse_function(f"BlockMatMul <bits, K, N, block: int = 32> ({inputs}) => (y) {{ {body} }}", microsoft=True)


def function_for(node: ir.Node) -> ir.Function:
    """The body that fits a node's inputs; nodes with and without minima differ in their overload."""
    return function_by_mins(node, function_body)
