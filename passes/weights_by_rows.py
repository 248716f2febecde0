"""Float matrices as checkpoints store them, a row for a column of the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from dsc.passes.base import GraphPass, PassResult, Reason
from dsc.passes.graph_edit import MICROSOFT, import_domain
from dsc.passes.matmul_weights import find_matmul_weight, matmul_weights, store_transposed


@dataclass(frozen=True)
class WeightsByRowsPass(GraphPass):
    """Multiply by the rows of every matrix.

    ::

        y = MatMul(x, W[k, n])  ->  y = FusedMatMul(x, W'[n, k], transB=1)

    onnxruntime packs both spellings equally at load and runs them equally fast; the native kernels read rows.

    Rules:
        1. Only products read the matrix, all of them by columns: it is never stored twice.
    """

    name: ClassVar[str] = "weights-by-rows"

    def call(self, model: ir.Model) -> PassResult:
        """Turn every matrix that products alone read."""
        fired = 0
        skipped: list[Reason] = []
        for weight in matmul_weights(model.graph):
            if weight.by_rows or weight.transpose is not None:
                continue
            users = [node for node, _ in weight.value.uses()]
            found = [find_matmul_weight(node) for node in users]
            if weight.value.is_graph_output() or any(one is None or one.by_rows for one in found):
                skipped.append(Reason("1", weight.name, "something else reads the matrix as it is"))
                continue
            store_transposed(weight.value)
            for node in users:
                node.domain, node.op_type = MICROSOFT, "FusedMatMul"
                node.attributes["transB"] = ir.AttrInt64("transB", 1)
            fired += 1
        if fired:
            import_domain(model, MICROSOFT)
        return PassResult(fired, tuple(skipped))
