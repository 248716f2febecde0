"""Float matrices in half their room where that loses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from dsc.kernels.int16 import BLOCK, exact_scales, pack_codes, pack_scales
from dsc.passes.base import GraphPass, PassResult, Reason
from dsc.passes.graph_edit import (
    DSPARK,
    add_initializer,
    attribute,
    drop_unused_initializers,
    import_domain,
    insert,
    is_op,
    rearranged,
    remove_dead,
    replace_value,
)
from dsc.passes.matmul_weights import MatMulWeight, find_matmul_weight, matmul_weights


@dataclass(frozen=True)
class WeightsInInt16Pass(GraphPass):
    """Hold float32 matrices as 16-bit numbers and a scale for each block of 32, where they are exactly that.

    ::

        y = FusedMatMul(x, W[n, k], transB=1)  ->  y = Int16MatMul(x, W.codes[n/2, k/8, 2, 8], W.scales[n/2, k/32, 2])
        e = Gather(W, ids)                     ->  e = Int16Gather(ids, W.codes, W.scales)

    A step takes the time in which memory delivers the weights, and half of them take half of it; every result is the
    same bits as with the floats. Matrices out of 4-, 5- and 8-bit blocks are of this kind, trained floats are not.

    Run after weights-by-rows and whatever merges or quantises matrices.

    Rules:
        1. Only products by rows and gathers of rows by 64-bit ids read the matrix.
        2. It is float32, and k is a multiple of 32.
        3. Every weight of every block is a 16-bit number times the block's scale, exactly.
    """

    name: ClassVar[str] = "weights-in-int16"

    def call(self, model: ir.Model) -> PassResult:
        """Replace whatever reads such a matrix."""
        weights = {weight.value: weight for weight in matmul_weights(model.graph)}
        fired = 0
        skipped: list[Reason] = []
        for weight in weights.values():
            scales = None
            if not all(_reads_rows(user) for user, _ in weight.value.uses()) or weight.value.is_graph_output():
                skipped.append(Reason("1", weight.name, "something else reads it"))
            elif weight.value.dtype != ir.DataType.FLOAT or weight.k % BLOCK:
                skipped.append(Reason("2", weight.name, f"{weight.value.dtype} with {weight.k} weights a column"))
            elif (scales := exact_scales(weight.rows())) is None:
                skipped.append(Reason("3", weight.name, "its floats need more than 16 bits"))
            if scales is not None:
                users = [user for user, _ in weight.value.uses()]
                _replace(model.graph, weight, scales, users)
                fired += len(users)
        if fired:
            import_domain(model, DSPARK)
        drop_unused_initializers(model.graph)
        return PassResult(fired, tuple(skipped))


def _reads_rows(node: ir.Node) -> bool:
    if is_op(node, "Gather"):
        ids = node.inputs[1]
        return not attribute(node, "axis", 0) and ids is not None and ids.dtype == ir.DataType.INT64
    found = find_matmul_weight(node)
    return found is not None and found.by_rows and found.transpose is None


def _replace(graph: ir.Graph, weight: MatMulWeight, scales: npt.NDArray[Any], users: Sequence[ir.Node]) -> None:
    tensor = weight.value.const_value
    if tensor is None:
        raise ValueError(f"{weight.name!r} has no content")
    packed = pack_scales(scales)
    shape = [len(packed), weight.k // 8, 2, 8]
    codes = rearranged(tensor, partial(_codes, scales=scales), shape, ir.DataType.INT16)
    blocks = [add_initializer(graph, f"{weight.name}.codes", codes)]
    blocks.append(add_initializer(graph, f"{weight.name}.scales", packed))
    for node in users:
        kind, rows = ("Int16Gather", node.inputs[1]) if is_op(node, "Gather") else ("Int16MatMul", node.inputs[0])
        output, sizes = node.outputs[0], {"K": weight.k, "N": weight.n}
        made = insert(node, kind, [rows, *blocks], sizes, domain=DSPARK, like=output)
        replace_value(output, made.outputs[0])
        remove_dead([node])


def _codes(weight: npt.NDArray[Any], scales: npt.NDArray[Any]) -> npt.NDArray[np.int16]:
    return pack_codes(weight, scales)
