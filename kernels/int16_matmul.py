"""`Int16MatMul`: `DenseMatMul` over a float weight that is held as 16-bit numbers and a scale a block, exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dsc.kernels import dense_matmul
from dsc.kernels.block_matmul import BLOCK
from dsc.kernels.contract import Array, Axes, KernelContract, TensorRole
from dsc.kernels.dense_matmul import DENSE_PRODUCT
from dsc.kernels.function_text import parse_function
from dsc.kernels.int16 import UNPACKING, pack_codes, pack_scales, unpack

if TYPE_CHECKING:
    import onnx_ir as ir


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """y [.., N] = x [.., K] weight^T with ``weight = code * scale``."""
    n = attributes.get("N", 2 * len(inputs["codes"]))
    weight = unpack(inputs["codes"], inputs["scales"], n)
    return dense_matmul.reference({"x": inputs["x"], "weight": weight}, {})


def make_weight(n: int, k: int, seed: int) -> tuple[Array, Array]:
    """Codes and scales of a random [n, k]: all 16 bits are used, scales are powers of two and other numbers."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(-(2**15) + 1, 2**15, (n, k)).astype(np.float32)
    scales = np.exp2(rng.integers(-24, -18, (n, k // BLOCK))).astype(np.float32)
    codes.reshape(n, -1, BLOCK)[:, ::2] //= 256  # as in 8 bits: there a scale has eleven bits of its own
    scales[:, ::2] *= rng.integers(1024, 2048, scales[:, ::2].shape)
    weight = (codes.reshape(n, -1, BLOCK) * scales[..., None]).reshape(n, k)
    return pack_codes(weight, scales), pack_scales(scales)


def make_inputs(axes: Axes, seed: int) -> dict[str, Array]:
    """Those of `DenseMatMul`, the weight in 16 bits."""
    codes, scales = make_weight(2 * axes["P"], axes["K"], seed)
    x = dense_matmul.make_inputs({**axes, "N": 1}, seed)["x"]
    return {"x": x, "codes": codes, "scales": scales}


def _nbytes(axes: Axes) -> int:
    return 2 * axes["P"] * (2 * axes["K"] + 4 * axes["G"]) + 4 * axes["M"] * (axes["K"] + axes["N"])


def _flops(axes: Axes) -> int:
    return 2 * axes["M"] * axes["N"] * axes["K"]


INT16_MATMUL = KernelContract(
    name="Int16MatMul",
    axes={
        "M": "rows of activations",
        "K": "inner size, 32 G",
        "G": "blocks of 32 along the inner axis",
        "E": "eights along the inner axis, 4 G",
        "N": "columns of the output",
        "P": "pairs of columns, N / 2 rounded up",
    },
    inputs=(
        TensorRole("x", ("M", "K"), "float32"),
        TensorRole("codes", ("P", "E", 2, 8), "int16"),
        TensorRole("scales", ("P", "G", 2), "float32"),
    ),
    outputs=(TensorRole("y", ("M", "N"), "float32"),),
    attributes={"K": "inner size", "N": "columns of the output"},
    reference=reference,
    make_inputs=make_inputs,
    nbytes=_nbytes,
    flops=_flops,
    example={"M": 3, "K": 96, "G": 3, "E": 12, "N": 38, "P": 19},
)

INT16_PRODUCT = f"{UNPACKING} {DENSE_PRODUCT}"
"""Nodes that give `y` as `DenseMatMul` does, in a function's text."""


def function_body() -> ir.Function:
    """The weight as floats, then onnxruntime's own product."""
    return parse_function(f"Int16MatMul <K, N> (x, codes, scales) => (y) {{ {INT16_PRODUCT} }}", microsoft=True)


def function_for(node: ir.Node) -> ir.Function:
    """The body of a node: there is one only."""
    return function_body()
