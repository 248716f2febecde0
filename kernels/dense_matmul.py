"""`DenseMatMul`: activations times a float weight stored as in checkpoints, a row for a column of the result.

A weight in bfloat16 stands for the floats that it is worth: products and sums are those of float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dsc.kernels.contract import Array, Axes, KernelContract, TensorRole
from dsc.kernels.function_text import function_by_type, parse_function

if TYPE_CHECKING:
    import onnx_ir as ir


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """y [.., N] = x [.., K] weight^T."""
    x, weight = inputs["x"], inputs["weight"]
    return {"y": (x.astype(np.float64) @ weight.astype(np.float64).T).astype(x.dtype)}


def make_inputs(axes: Axes, seed: int) -> dict[str, Array]:
    """Activations that differ in size from row to row."""
    rng = np.random.default_rng(seed)
    size = rng.uniform(0.1, 10, (axes["M"], 1)).astype(np.float32)
    return {
        "x": rng.standard_normal((axes["M"], axes["K"]), dtype=np.float32) * size,
        "weight": rng.standard_normal((axes["N"], axes["K"]), dtype=np.float32),
    }


def _nbytes(axes: Axes) -> int:
    return 4 * (axes["N"] * axes["K"] + axes["M"] * (axes["K"] + axes["N"]))


def _flops(axes: Axes) -> int:
    return 2 * axes["M"] * axes["N"] * axes["K"]


DENSE_MATMUL = KernelContract(
    name="DenseMatMul",
    axes={"M": "rows of activations", "K": "inner size", "N": "columns of the output"},
    inputs=(TensorRole("x", ("M", "K"), "float32"), TensorRole("weight", ("N", "K"), "float32")),
    outputs=(TensorRole("y", ("M", "N"), "float32"),),
    reference=reference,
    make_inputs=make_inputs,
    nbytes=_nbytes,
    flops=_flops,
    example={"M": 3, "K": 53, "N": 37},
)

DENSE_PRODUCT = "y = com.microsoft.FusedMatMul <transB = 1> (x, weight)"
"""The node that gives `y`, in a function's text."""

WIDENED = "weight = Cast <to = 1> (halves)"
"""What comes before it where the weight is held in bfloat16."""


def function_body(halves: bool = False) -> ir.Function:
    """The operator as onnxruntime's own product; `halves`: of a weight in bfloat16."""
    weight, first = ("halves", WIDENED) if halves else ("weight", "")
    return parse_function(f"DenseMatMul (x, {weight}) => (y) {{ {first} {DENSE_PRODUCT} }}", microsoft=True)


def function_for(node: ir.Node) -> ir.Function:
    """The body that fits the type of a node's weight; their overloads differ."""
    return function_by_type(node, function_body)
