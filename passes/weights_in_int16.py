"""Float matrices in half their room where that loses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy.typing as npt
import onnx_ir as ir

from dsc.kernels.block_matmul import BLOCK
from dsc.kernels.int16 import exact_scales, pack_codes, pack_scales
from dsc.passes.base import GraphPass, PassResult, Reason
from dsc.passes.graph_edit import (
    DSPARK,
    add_initializer,
    drop_unused_initializers,
    import_domain,
    insert,
    is_op,
    rearranged,
    remove_dead,
    replace_value,
    tensor_dims,
)
from dsc.passes.matmul_weights import content, row_matrices


@dataclass(frozen=True)
class WeightsInInt16Pass(GraphPass):
    """Hold float32 matrices as 16-bit numbers and a scale for each block of 32, where they are exactly that.

    ::

        y = FusedMatMul(x, W[n, k], transB=1)  ->  y = Int16MatMul(x, W.codes[n/2, k/8, 2, 8], W.scales[n/2, k/32, 2])
        e = Gather(W, ids)                     ->  e = Int16Gather(ids, W.codes, W.scales)

    A step takes the time in which memory delivers the weights, and half of them take half of it; every result is the
    same bits as with the floats. Matrices out of 4-, 5- and 8-bit blocks are of this kind as a rule, trained ones not.

    Run after weights-by-rows and whatever merges or quantises matrices.

    Rules:
        1. Only products by rows and gathers of rows by 64-bit ids read the matrix.
        2. It is float32, and k is a multiple of 32.
        3. Every weight of every block is a 16-bit number times the block's scale, exactly; the sign of a zero is lost.
    """

    name: ClassVar[str] = "weights-in-int16"

    def call(self, model: ir.Model) -> PassResult:
        """Replace whatever reads such a matrix."""
        fired = 0
        skipped: list[Reason] = []
        for matrix, users in tuple(row_matrices(model.graph)):
            name, (_, k) = str(matrix.name), tensor_dims(content(matrix))
            if not users:
                skipped.append(Reason("1", name, "something else reads it, or not by its rows"))
            elif matrix.dtype != ir.DataType.FLOAT or k % BLOCK:
                skipped.append(Reason("2", name, f"{matrix.dtype} with {k} weights a column"))
            elif (scales := exact_scales(content(matrix).numpy())) is None:
                skipped.append(Reason("3", name, "its floats need more than 16 bits"))
            else:
                _replace(model.graph, matrix, scales, users)
                fired += len(users)
        if fired:
            import_domain(model, DSPARK)
        drop_unused_initializers(model.graph)
        return PassResult(fired, tuple(skipped))


def _replace(graph: ir.Graph, matrix: ir.Value, scales: npt.NDArray[Any], users: Sequence[ir.Node]) -> None:
    n, k = tensor_dims(content(matrix))
    packed = pack_scales(scales)
    shape = [len(packed), k // 8, 2, 8]
    codes = rearranged(content(matrix), partial(pack_codes, scales=scales), shape, ir.DataType.INT16)
    blocks = [add_initializer(graph, f"{matrix.name}.codes", codes)]
    blocks.append(add_initializer(graph, f"{matrix.name}.scales", packed))
    for node in users:
        kind, rows = ("Int16Gather", node.inputs[1]) if is_op(node, "Gather") else ("Int16MatMul", node.inputs[0])
        output = node.outputs[0]
        made = insert(node, kind, [rows, *blocks], {"K": k, "N": n}, domain=DSPARK, like=output)
        replace_value(output, made.outputs[0])
        remove_dead([node])
