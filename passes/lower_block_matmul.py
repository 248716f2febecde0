"""ai.dspark::BlockMatMul as onnxruntime's own MatMulNBits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from dsc.passes.base import GraphPass, PassResult
from dsc.passes.graph_edit import (
    DSPARK,
    MICROSOFT,
    add_initializer,
    attribute,
    import_domain,
    input_at,
    insert,
    is_op,
    owner,
    remove_dead,
    replace_value,
)


@dataclass(frozen=True)
class LowerBlockMatMulPass(GraphPass):
    """Replace every BlockMatMul by operators that a plain onnxruntime has kernels for.

    ::

        y = BlockMatMul(x, q, scales)        ->  y = MatMulNBits(x, q, scales)
        y = BlockMatMul(x, q, scales, mins)  ->  y = MatMulNBits(x, q, scales) + sums(x) mins^T
                                                 sums(x) = ReduceSum(Reshape(x, [.., K/block, block]))

    MatMulNBits could hold the minima as zero points, but with float zero points it de-quantises every matrix at
    every call (50 times slower), and integer ones round the minimum away. The correction is exact and small.

    Rules:
        1. Without minima the operator is MatMulNBits itself.
        2. With minima a product of the activations' block sums is added; products of one input share the sums.
    """

    name: ClassVar[str] = "lower-block-matmul"

    def call(self, model: ir.Model) -> PassResult:
        """Lower every BlockMatMul of the main graph."""
        nodes = [node for node in model.graph if is_op(node, "BlockMatMul", DSPARK)]
        sums: dict[tuple[int, int], ir.Value] = {}
        for node in nodes:
            _lower(node, sums)
        if nodes:
            import_domain(model, MICROSOFT)
        return PassResult(len(nodes))


def _lower(node: ir.Node, sums: dict[tuple[int, int], ir.Value]) -> None:
    output, mins = node.outputs[0], input_at(node, 3)
    block = attribute(node, "block", 32)
    attributes = {
        "K": attribute(node, "K", 0),
        "N": attribute(node, "N", 0),
        "bits": attribute(node, "bits", 4),
        "block_size": block,
        "accuracy_level": attribute(node, "accuracy_level", 4),
    }
    lowered = insert(node, "MatMulNBits", node.inputs[:3], attributes, domain=MICROSOFT, like=output)
    product = lowered.outputs[0]
    if mins is not None:
        source = node.inputs[0]
        if source is None:
            raise ValueError(f"node {node.name!r} has no activations")
        key = (id(source), block)
        if key not in sums:
            sums[key] = _block_sums(node, source, block)
        added = insert(node, "FusedMatMul", [sums[key], mins], {"transB": 1}, domain=MICROSOFT, like=output)
        product = insert(node, "Add", [product, added.outputs[0]], like=output).outputs[0]
    replace_value(output, product)
    remove_dead([node])


def _block_sums(anchor: ir.Node, x: ir.Value, block: int) -> ir.Value:
    """Sums of each block of `x` [B, S, K]: [B, S, K/block]."""
    graph = owner(anchor)
    shape = add_initializer(graph, f"blocks_of_{block}", np.array([0, 0, -1, block]))
    axis = add_initializer(graph, "last_axis", np.array([-1]))
    split = insert(anchor, "Reshape", [x, shape], dtype=x.dtype)
    return insert(anchor, "ReduceSum", [split.outputs[0], axis], {"keepdims": 0}, dtype=x.dtype).outputs[0]
