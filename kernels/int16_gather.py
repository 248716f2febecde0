"""`Int16Gather`: rows of an embedding out of the 16-bit numbers of a head that it is tied to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dsc.kernels.contract import Array, Axes, KernelContract, TensorRole
from dsc.kernels.function_text import parse_function
from dsc.kernels.int16 import unpack
from dsc.kernels.int16_matmul import make_weight

if TYPE_CHECKING:
    import onnx_ir as ir


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """rows [.., K] = row `ids` [..], each 0 .. N - 1, of the weight [N, K]."""
    weight = unpack(inputs["codes"], inputs["scales"], 2 * len(inputs["codes"]))
    return {"rows": weight[inputs["ids"]]}


def make_inputs(axes: Axes, seed: int) -> dict[str, Array]:
    """Random blocks, and ids with the first and the last column among them."""
    n = 2 * axes["P"]
    codes, scales = make_weight(n, axes["K"], seed)
    ids = np.random.default_rng(seed).integers(0, n, axes["S"])
    ids[0], ids[-1] = 0, n - 1
    return {"ids": ids, "codes": codes, "scales": scales}


def _nbytes(axes: Axes) -> int:
    return axes["S"] * (6 * axes["K"] + 4 * axes["G"] + 8)


def _flops(axes: Axes) -> int:
    return axes["S"] * axes["K"]


INT16_GATHER = KernelContract(
    name="Int16Gather",
    axes={
        "S": "tokens",
        "K": "width, 32 G",
        "G": "blocks of 32 in a row",
        "E": "eights in a row, 4 G",
        "P": "pairs of rows",
    },
    inputs=(
        TensorRole("ids", ("S",), "int64"),
        TensorRole("codes", ("P", "E", 2, 8), "int16"),
        TensorRole("scales", ("P", "G", 2), "float32"),
    ),
    outputs=(TensorRole("rows", ("S", "K"), "float32"),),
    attributes={"K": "width", "N": "rows of the table"},
    reference=reference,
    make_inputs=make_inputs,
    nbytes=_nbytes,
    flops=_flops,
    example={"S": 5, "K": 96, "G": 3, "E": 12, "P": 4},
)

_BODY = """
  zero = Constant <value_int = 0> ()
  one = Constant <value_int = 1> ()
  two = Constant <value_int = 2> ()
  rest = Constant <value_ints = [-1]> ()
  inner = Constant <value_int: int = @K> ()
  width = Reshape (inner, rest)
  lead = Shape (ids)
  flat = Reshape (ids, rest)
  pairs = Div (flat, two)
  odd = Mod (flat, two)
  is_first = Equal (odd, zero)
  code_dims = Constant <value_ints = [0, -1, 4, 2, 8]> ()
  scale_dims = Constant <value_ints = [0, -1, 1, 2, 1]> ()
  inner_axes = Constant <value_ints = [1, 2, 3]> ()
  code_pairs = Gather (codes, pairs)
  scale_pairs = Gather (scales, pairs)
  codes5 = Reshape (code_pairs, code_dims)
  scales5 = Reshape (scale_pairs, scale_dims)
  steps = Cast <to = 1> (codes5)
  both = Mul (steps, scales5)
  firsts = Gather <axis = 3> (both, zero)
  seconds = Gather <axis = 3> (both, one)
  choice = Unsqueeze (is_first, inner_axes)
  picked = Where (choice, firsts, seconds)
  dims = Concat <axis = 0> (lead, width)
  rows = Reshape (picked, dims)
"""


def function_body() -> ir.Function:
    """Both columns of a pair as floats, and the one that is asked for."""
    return parse_function(f"Int16Gather <K, N> (ids, codes, scales) => (rows) {{ {_BODY} }}")


def function_for(node: ir.Node) -> ir.Function:
    """The body of a node: there is one only."""
    return function_body()
