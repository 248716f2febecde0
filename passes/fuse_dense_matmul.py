"""Float products for the native kernels, which read the weights as the checkpoint stores them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from dsc.passes.base import GraphPass, PassResult, Reason
from dsc.passes.graph_edit import DSPARK, import_domain, insert, remove_dead, replace_value
from dsc.passes.matmul_weights import matmul_weights
from dsc.passes.weights_in_bfloat16 import halves_of


@dataclass(frozen=True)
class FuseDenseMatMulPass(GraphPass):
    """Let the native kernel multiply by float32 matrices.

    ::

        y = FusedMatMul(x, W[n, k], transB=1)        ->  y = DenseMatMul(x, W)
        y = FusedMatMul(x, Cast(W[n, k]), transB=1)  ->  y = DenseMatMul(x, W)

    The kernel needs no packed copy of W, and gives a row the same bits alone and among others.

    Run after weights-by-rows, which brings every matrix into this layout.

    Rules:
        1. W is constant, stored as [n, k], and float32, or in bfloat16 and cast to float32.
    """

    name: ClassVar[str] = "fuse-dense-matmul"

    def call(self, model: ir.Model) -> PassResult:
        """Replace every such product of the main graph."""
        fired = 0
        skipped: list[Reason] = []
        for weight in matmul_weights(model.graph):
            if not weight.by_rows or weight.transpose is not None or weight.value.dtype != ir.DataType.FLOAT:
                skipped.append(Reason("1", weight.name, "its matrix is no float32 one stored as [n, k]"))
                continue
            _fuse(weight.node, weight.value)
            fired += 1
        for node in tuple(model.graph):
            if (halves := halves_of(node)) is not None:
                _fuse(node, halves)
                fired += 1
        if fired:
            import_domain(model, DSPARK)
        return PassResult(fired, tuple(skipped))


def _fuse(node: ir.Node, weight: ir.Value) -> None:
    output = node.outputs[0]
    product = insert(node, "DenseMatMul", [node.inputs[0], weight], domain=DSPARK, like=output)
    replace_value(output, product.outputs[0])
    remove_dead([node])
