"""Matrices that are held in half their room as floats again, for what has to change or round them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from dsc.kernels.int16 import unpack
from dsc.passes.base import GraphPass, PassResult
from dsc.passes.graph_edit import (
    DSPARK,
    MICROSOFT,
    add_initializer,
    attribute,
    drop_unused_initializers,
    import_domain,
    insert,
    is_op,
    is_weight,
    rearranged,
    remove_dead,
    replace_value,
    tensor_dims,
)
from dsc.passes.matmul_weights import content

_INT16 = ("Int16MatMul", "Int16Gather")


@dataclass(frozen=True)
class FloatWeightsPass(GraphPass):
    """Undo weights-in-int16 and weights-in-bfloat16: every matrix as float32, made when it is read.

    ::

        y = Int16MatMul(x, codes, scales)       ->  y = FusedMatMul(x, W[n, k], transB=1)
        e = Int16Gather(ids, codes, scales)     ->  e = Gather(W, ids)
        y = FusedMatMul(x, Cast(W16), transB=1) ->  y = FusedMatMul(x, W, transB=1)
        e = Cast(Gather(W16, ids))              ->  e = Gather(W, ids)

    For graphs that come out of a bundle: other passes know float matrices only.

    Rules:
        1. One matrix is made of the same codes, whatever reads them.
        2. A matrix in bfloat16 becomes float32 where its products, or the rows that are gathered, are cast to that.
    """

    name: ClassVar[str] = "float-weights"

    def call(self, model: ir.Model) -> PassResult:
        """Replace every operator that reads such a matrix."""
        floats: dict[ir.Value, ir.Value] = {}
        fired = 0
        for node in tuple(model.graph):
            if node.domain == DSPARK and node.op_type in _INT16:
                _unpack(model.graph, node, floats)
                fired += 1
            elif is_op(node, "Cast") and attribute(node, "to", 0) == ir.DataType.FLOAT:
                fired += _widen(model.graph, node, floats)
        for name in [name for name in model.functions if name[0] == DSPARK and name[1] in _INT16]:
            del model.functions[name]
        if fired:
            import_domain(model, MICROSOFT)
        drop_unused_initializers(model.graph)
        return PassResult(fired)


def _unpack(graph: ir.Graph, node: ir.Node, floats: dict[ir.Value, ir.Value]) -> None:
    rows, codes, scales = node.inputs
    if codes is None or scales is None:
        raise ValueError(f"{node.name!r} has no codes or no scales")
    n, k = attribute(node, "N", 0), attribute(node, "K", 0)
    if codes not in floats:
        factors = content(scales)

        def change(found: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return unpack(found, factors.numpy(), n)

        name = str(codes.name).removesuffix(".codes")
        floats[codes] = add_initializer(graph, name, rearranged(content(codes), change, [n, k], ir.DataType.FLOAT))
    output, weight = node.outputs[0], floats[codes]
    if node.op_type == "Int16Gather":
        made = insert(node, "Gather", [weight, rows], like=output)
    else:
        made = insert(node, "FusedMatMul", [rows, weight], {"transB": 1}, domain=MICROSOFT, like=output)
    replace_value(output, made.outputs[0])
    remove_dead([node])


def _widen(graph: ir.Graph, cast: ir.Node, floats: dict[ir.Value, ir.Value]) -> int:
    """Float32 in place of what `cast` casts, where that is a matrix or rows gathered out of one; 1 if so."""
    source = cast.inputs[0]
    gather = None if source is None else source.producer()
    matrix = source if gather is None else gather.inputs[0] if is_op(gather, "Gather") else None
    if matrix is None or not is_weight(matrix) or matrix.dtype != ir.DataType.BFLOAT16:
        return 0
    dims = tensor_dims(content(matrix))
    if len(dims) != 2:
        return 0
    if matrix not in floats:
        name = str(matrix.name).removesuffix(".bfloat16")
        wide = rearranged(content(matrix), _to_floats, dims, ir.DataType.FLOAT)
        floats[matrix] = add_initializer(graph, name, wide)
    found = floats[matrix]
    if gather is not None:
        found = insert(cast, "Gather", [found, gather.inputs[1]], like=cast.outputs[0]).outputs[0]
    replace_value(cast.outputs[0], found)
    remove_dead([cast])
    return 1


def _to_floats(halves: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return halves.astype(np.float32)
