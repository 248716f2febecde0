"""`InterleavedGather`: rows of an embedding out of the blocks of a head that is stored by sixteen columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dsc.kernels import block_matmul
from dsc.kernels.contract import Array, Axes, KernelContract, TensorRole
from dsc.kernels.function_text import function_by_mins, parse_function
from dsc.kernels.interleave import COLUMNS, MINS_SEPARATION, SEPARATION, separate_codes, separate_factors
from dsc.kernels.interleaved_matmul import interleaved

if TYPE_CHECKING:
    import onnx_ir as ir


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """rows [.., K] = row `ids` [..] of the weight [N, K]: ``scale * (code - 2^(bits-1)) + min``."""
    n = inputs["scales"].shape[0] * COLUMNS
    qweight, mins = separate_codes(inputs["qweight"], n), inputs.get("mins")
    minima = None if mins is None else separate_factors(mins, n)
    bits = int(qweight.shape[2]) * 8 // block_matmul.BLOCK
    weight = block_matmul.dequantise(qweight, separate_factors(inputs["scales"], n), minima, bits)
    return {"rows": weight[inputs["ids"]]}


def make_inputs(axes: Axes, seed: int) -> dict[str, Array]:
    """Random blocks with minima, and ids with the first and the last column among them."""
    whole = {**axes, "N": axes["T"] * COLUMNS, "M": 1}
    blocks = interleaved(block_matmul.make_bits_inputs(whole, seed, axes["Q"]))
    ids = np.random.default_rng(seed).integers(0, whole["N"], axes["S"])
    ids[0], ids[-1] = 0, whole["N"] - 1
    return {"ids": ids, **{name: blocks[name] for name in ("qweight", "scales", "mins")}}


def _nbytes(axes: Axes) -> int:
    return axes["S"] * (axes["G"] * (4 * axes["Q"] + 8) + 4 * axes["K"] + 8)


def _flops(axes: Axes) -> int:
    return 2 * axes["S"] * axes["K"]


INTERLEAVED_GATHER = KernelContract(
    name="InterleavedGather",
    axes={
        "S": "tokens",
        "G": "blocks of 32 in a row",
        "K": "width, 32 G",
        "T": "groups of sixteen rows",
        "Q": "fours of bytes of a block: 4 or 8, as many as bits",
    },
    inputs=(
        TensorRole("ids", ("S",), "int64"),
        TensorRole("qweight", ("T", "G", "Q", COLUMNS, 4), "uint8"),
        TensorRole("scales", ("T", "G", COLUMNS), "float32"),
        TensorRole("mins", ("T", "G", COLUMNS), "float32", optional=True),
    ),
    outputs=(TensorRole("rows", ("S", "K"), "float32"),),
    attributes={"bits": "4 or 8", "K": "width", "N": "rows of the table", "block": "32"},
    reference=reference,
    make_inputs=make_inputs,
    nbytes=_nbytes,
    flops=_flops,
    example={"S": 5, "G": 3, "K": 96, "T": 2, "Q": 8},
)

_PICKED = """
  two = Constant <value_ints = [2]> ()
  factors3 = Unsqueeze (factors, two)
  picked = com.microsoft.GatherBlockQuantized <bits: int = @bits, block_size: int = @block, gather_axis = 0,
      quantize_axis = 2> (codes, ids, factors3)
  lead = Shape (ids)
  dims = Concat <axis = 0> (lead, rest)
"""
_SHIFTED = """
  minima3 = Unsqueeze (minima, two)
  shifts = Gather (minima3, ids)
  shifted = Add (picked, shifts)
  rows = Reshape (shifted, dims)
"""


def function_body(has_mins: bool = False) -> ir.Function:
    """The columns put apart again, then onnxruntime's GatherBlockQuantized, and the minima added."""
    head = "InterleavedGather <bits, K, N, block: int = 32> (ids, qweight, scales"
    if not has_mins:
        body = f"{SEPARATION} {_PICKED} rows = Reshape (picked, dims)"
        return parse_function(f"{head}) => (rows) {{ {body} }}", microsoft=True)
    body = SEPARATION + MINS_SEPARATION + _PICKED + _SHIFTED
    return parse_function(f"{head}, mins) => (rows) {{ {body} }}", microsoft=True)


def function_for(node: ir.Node) -> ir.Function:
    """The body that fits a node's inputs; nodes with and without minima differ in their overload."""
    return function_by_mins(node, function_body)
