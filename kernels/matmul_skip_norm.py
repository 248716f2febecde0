"""`DenseMatMulSkipNorm` and its kin: a product, a residual addition, the normalisation of the sum.

The sum is the next residual; a product that ends in it needs no other operator between itself and the next product.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dsc.kernels.contract import Array, Axes, KernelContract, TensorRole
from dsc.kernels.dense_matmul import DENSE_MATMUL, DENSE_PRODUCT, WIDENED
from dsc.kernels.function_text import function_by_mins, function_by_type, parse_function
from dsc.kernels.int16_matmul import INT16_MATMUL, INT16_PRODUCT
from dsc.kernels.interleaved_matmul import INTERLEAVED_MATMUL, interleaved_product

if TYPE_CHECKING:
    import onnx_ir as ir

_ENDING = """
  sum = Add (y, skip)
  normed = RMSNormalization <axis = -1, epsilon: float = @epsilon> (sum, gain)
"""


def _contract(product: KernelContract) -> KernelContract:
    """`product`, then ``sum = y + skip; normed = RMSNorm(sum) gain`` (Zhang and Sennrich 2019)."""

    def reference(inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
        y = product.reference(inputs, attributes)["y"]
        total = y.astype(np.float64) + inputs["skip"]
        size = np.sqrt(np.mean(total**2, axis=-1, keepdims=True) + attributes.get("epsilon", 1e-5))
        return {"normed": (total / size * inputs["gain"]).astype(y.dtype), "sum": total.astype(y.dtype)}

    def make_inputs(axes: Axes, seed: int) -> dict[str, Array]:
        rng = np.random.default_rng(seed)
        made = product.make_inputs(axes, seed)
        skip = 4 * rng.standard_normal((axes["M"], axes["N"]), dtype=np.float32)
        return {**made, "skip": skip, "gain": rng.uniform(0.5, 2, axes["N"]).astype(np.float32)}

    def nbytes(axes: Axes) -> int:
        return product.nbytes(axes) + 4 * axes["N"] * (2 * axes["M"] + 1)

    def flops(axes: Axes) -> int:
        return product.flops(axes) + 5 * axes["M"] * axes["N"]

    return KernelContract(
        name=f"{product.name}SkipNorm",
        axes=product.axes,
        inputs=(
            *product.inputs,
            TensorRole("skip", ("M", "N"), "float32"),
            TensorRole("gain", ("N",), "float32"),
        ),
        outputs=(TensorRole("normed", ("M", "N"), "float32"), TensorRole("sum", ("M", "N"), "float32")),
        attributes={**product.attributes, "epsilon": "added to the mean of the squares"},
        reference=reference,
        make_inputs=make_inputs,
        nbytes=nbytes,
        flops=flops,
        example=product.example,
        tolerances=product.tolerances,
    )


DENSE_MATMUL_SKIP_NORM = _contract(DENSE_MATMUL)
INT16_MATMUL_SKIP_NORM = _contract(INT16_MATMUL)
INTERLEAVED_MATMUL_SKIP_NORM = _contract(INTERLEAVED_MATMUL)


def dense_body(halves: bool = False) -> ir.Function:
    """The operator as onnxruntime's own product, addition and normalisation; `halves`: of a weight in bfloat16."""
    weight, first = ("halves", WIDENED) if halves else ("weight", "")
    head = f"DenseMatMulSkipNorm <epsilon> (x, {weight}, skip, gain) => (normed, sum)"
    return parse_function(f"{head} {{ {first} {DENSE_PRODUCT} {_ENDING} }}", microsoft=True)


def int16_body() -> ir.Function:
    """As `Int16MatMul`, then addition and normalisation."""
    head = "Int16MatMulSkipNorm <K, N, epsilon> (x, codes, scales, skip, gain) => (normed, sum)"
    return parse_function(f"{head} {{ {INT16_PRODUCT} {_ENDING} }}", microsoft=True)


def interleaved_body(has_mins: bool = False) -> ir.Function:
    """As `InterleavedMatMul`, then addition and normalisation."""
    inputs = "x, qweight, scales, mins, skip, gain" if has_mins else "x, qweight, scales, no_mins, skip, gain"
    head = f"InterleavedMatMulSkipNorm <bits, K, N, epsilon, block: int = 32> ({inputs}) => (normed, sum)"
    return parse_function(f"{head} {{ {interleaved_product(has_mins)} {_ENDING} }}", microsoft=True)


def function_for(node: ir.Node) -> ir.Function:
    """The body that fits a node's operator and inputs."""
    if node.op_type == "DenseMatMulSkipNorm":
        return function_by_type(node, dense_body)
    return int16_body() if node.op_type == "Int16MatMulSkipNorm" else function_by_mins(node, interleaved_body)
