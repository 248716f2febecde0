"""Float matrices out of checkpoints in bfloat16, which hold all of them in half their room."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from dsc.passes.base import GraphPass, PassResult, Reason
from dsc.passes.graph_edit import (
    MICROSOFT,
    add_initializer,
    attribute,
    drop_unused_initializers,
    input_at,
    insert,
    is_op,
    is_weight,
    producer,
    rearranged,
    remove_dead,
    replace_value,
    tensor_dims,
)
from dsc.passes.matmul_weights import content, row_matrices

_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class WeightsInBfloat16Pass(GraphPass):
    """Hold float32 matrices in bfloat16 where that is all that they are.

    ::

        y = FusedMatMul(x, W[n, k], transB=1)  ->  y = FusedMatMul(x, Cast(W16), transB=1)
        e = Gather(W, ids)                     ->  e = Cast(Gather(W16, ids))

    The checkpoints of most models are in bfloat16; a float32 that was one has zeros in its lower half. A step takes the
    time in which memory delivers the weights, and half of them take half of it. fuse-dense-matmul lets the native
    kernel read them as they are; onnxruntime casts them when it opens its own graph.

    Run after weights-by-rows and whatever merges or quantises matrices.

    Rules:
        1. Only products by rows and gathers of rows by 64-bit ids read the matrix.
        2. It is float32, and every weight is a bfloat16 exactly.
    """

    name: ClassVar[str] = "weights-in-bfloat16"

    def call(self, model: ir.Model) -> PassResult:
        """Replace every such matrix."""
        fired = 0
        skipped: list[Reason] = []
        for matrix, users in tuple(row_matrices(model.graph)):
            if not users:
                skipped.append(Reason("1", str(matrix.name), "something else reads it, or not by its rows"))
            elif matrix.dtype != ir.DataType.FLOAT or not _are_halves(content(matrix).numpy()):
                why = "its weights are not float32 with zeros in their lower halves"
                skipped.append(Reason("2", str(matrix.name), why))
            else:
                _replace(model.graph, matrix, users)
                fired += len(users)
        drop_unused_initializers(model.graph)
        return PassResult(fired, tuple(skipped))


def halves_of(node: ir.Node) -> ir.Value | None:
    """The matrix [n, k] in bfloat16 that a product casts and multiplies by, None when it does something else."""
    if not is_op(node, "FusedMatMul", MICROSOFT) or attribute(node, "transA", 0) or not attribute(node, "transB", 0):
        return None
    cast = producer(input_at(node, 1))
    if not is_op(cast, "Cast") or cast is None or attribute(node, "alpha", 1.0) != 1:
        return None
    weight = cast.inputs[0]
    if weight is None or not is_weight(weight) or weight.dtype != ir.DataType.BFLOAT16:
        return None
    return weight if len(weight.shape or ()) == 2 else None


def _are_halves(weight: npt.NDArray[Any]) -> bool:
    """Whether float32 weights [n, k] are worth bfloat16 ones; read no further than the first that is not."""
    rows = (weight[at : at + _ROWS_AT_ONCE] for at in range(0, len(weight), _ROWS_AT_ONCE))
    return not any((np.ascontiguousarray(part).view(np.uint32) & 0xFFFF).any() for part in rows)


def _replace(graph: ir.Graph, weight: ir.Value, users: Sequence[ir.Node]) -> None:
    tensor = content(weight)
    stored = rearranged(tensor, _to_halves, tensor_dims(tensor), ir.DataType.BFLOAT16)
    halves = add_initializer(graph, f"{weight.name}.bfloat16", stored)
    for node in users:
        if is_op(node, "Gather"):
            rows = insert(node, "Gather", [halves, node.inputs[1]], dtype=halves.dtype, shape=node.outputs[0].shape)
            cast = insert(node, "Cast", rows.outputs, {"to": ir.DataType.FLOAT}, like=node.outputs[0])
            replace_value(node.outputs[0], cast.outputs[0])
            remove_dead([node])
        else:
            cast = insert(node, "Cast", [halves], {"to": ir.DataType.FLOAT}, like=weight)
            node.replace_input_with(1, cast.outputs[0])


def _to_halves(weight: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return weight.astype(ml_dtypes.bfloat16)
