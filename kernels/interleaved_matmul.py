"""`InterleavedMatMul`: `BlockMatMul` over a weight that is stored by sixteen columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dsc.kernels import block_matmul
from dsc.kernels.block_matmul import product_text
from dsc.kernels.contract import Array, Axes, KernelContract, TensorRole
from dsc.kernels.function_text import function_by_mins, parse_function
from dsc.kernels.interleave import (
    COLUMNS,
    MINS_SEPARATION,
    SEPARATION,
    interleave_codes,
    interleave_factors,
    separate_codes,
    separate_factors,
)

if TYPE_CHECKING:
    import onnx_ir as ir


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """y [.., N] = x [.., K] weight^T, as `BlockMatMul` defines it."""
    n = attributes.get("N", inputs["scales"].shape[0] * COLUMNS)
    rows = {"x": inputs["x"], "qweight": separate_codes(inputs["qweight"], n)}
    rows |= {name: separate_factors(inputs[name], n) for name in ("scales", "mins") if name in inputs}
    return block_matmul.reference(rows, attributes)


def interleaved(rows: Mapping[str, Array]) -> dict[str, Array]:
    """The inputs of this operator from those of `BlockMatMul`."""
    factors = {name: interleave_factors(rows[name]) for name in ("scales", "mins") if name in rows}
    return {"x": rows["x"], "qweight": interleave_codes(rows["qweight"]), **factors}


def make_inputs(axes: Axes, seed: int) -> dict[str, Array]:
    """Those of `BlockMatMul`, interleaved."""
    whole = {**axes, "N": axes["T"] * COLUMNS}
    return interleaved(block_matmul.make_bits_inputs(whole, seed, axes["Q"]))


def _nbytes(axes: Axes) -> int:
    return axes["N"] * axes["G"] * (4 * axes["Q"] + 8) + 4 * axes["M"] * (axes["G"] * block_matmul.BLOCK + axes["N"])


def _flops(axes: Axes) -> int:
    return 2 * axes["M"] * axes["N"] * axes["G"] * block_matmul.BLOCK


INTERLEAVED_MATMUL = KernelContract(
    name="InterleavedMatMul",
    axes={
        "M": "rows of activations",
        "G": "blocks of 32 along the inner axis",
        "K": "inner size, 32 G",
        "N": "columns of the output",
        "T": "groups of sixteen columns, N / 16 rounded up",
        "Q": "fours of bytes of a block: 4 or 8, as many as bits",
    },
    inputs=(
        TensorRole("x", ("M", "K"), "float32"),
        TensorRole("qweight", ("T", "G", "Q", COLUMNS, 4), "uint8"),
        TensorRole("scales", ("T", "G", COLUMNS), "float32"),
        TensorRole("mins", ("T", "G", COLUMNS), "float32", optional=True),
    ),
    outputs=(TensorRole("y", ("M", "N"), "float32"),),
    attributes=block_matmul.BLOCK_MATMUL.attributes,
    reference=reference,
    make_inputs=make_inputs,
    nbytes=_nbytes,
    flops=_flops,
    example={"M": 3, "G": 5, "K": 160, "N": 48, "T": 3, "Q": 4},
    tolerances=block_matmul.BLOCK_MATMUL.tolerances,
)


def interleaved_product(has_mins: bool) -> str:
    """Nodes that put the columns apart again and give `y` as `BlockMatMul` does, in a function's text."""
    separation = SEPARATION + MINS_SEPARATION if has_mins else SEPARATION
    return separation + product_text("codes", "factors", "minima" if has_mins else None)


def function_body(has_mins: bool = False) -> ir.Function:
    """The operator in those of onnxruntime."""
    inputs = "x, qweight, scales, mins" if has_mins else "x, qweight, scales"
    head = f"InterleavedMatMul <bits, K, N, block: int = 32> ({inputs}) => (y)"
    return parse_function(f"{head} {{ {interleaved_product(has_mins)} }}", microsoft=True)


def function_for(node: ir.Node) -> ir.Function:
    """The body that fits a node's inputs; nodes with and without minima differ in their overload."""
    return function_by_mins(node, function_body)
