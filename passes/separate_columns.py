"""Interleaved matrices for kernels that read rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from dsc.kernels.interleave import COLUMNS
from dsc.passes.base import GraphPass, PassResult
from dsc.passes.graph_edit import (
    DSPARK,
    MICROSOFT,
    add_initializer,
    attribute,
    import_domain,
    insert,
    owner,
    remove_dead,
    replace_value,
    tensor_dims,
)
from dsc.passes.quantize_embedding import gather_blocks

Separated = dict[ir.Value, ir.Value]
"""What was put apart, by the interleaved initializer."""


@dataclass(frozen=True)
class SeparateColumnsPass(GraphPass):
    """Let onnxruntime put the columns of interleaved matrices apart again.

    ::

        y = InterleavedMatMul(x, q', s')    ->  y = BlockMatMul(x, q, s)
        e = InterleavedGather(ids, q', s')  ->  e = Reshape(GatherBlockQuantized(q, ids, s))
                                                q = Reshape(Transpose(q')), s = Reshape(Transpose(s'))

    The bundle keeps one copy for all its graphs. What is put apart depends on constants only, so onnxruntime does it
    when it opens the graph, not in every run.

    Rules:
        1. Every interleaved matrix is put apart once, whatever reads it.
        2. Columns that only fill up the last sixteen are cut off.
    """

    name: ClassVar[str] = "separate-columns"

    def call(self, model: ir.Model) -> PassResult:
        """Replace every operator that reads interleaved matrices."""
        rewrite = {"InterleavedMatMul": _product, "InterleavedGather": _gather}
        separated: Separated = {}
        nodes = [node for node in model.graph if node.domain == DSPARK and node.op_type in rewrite]
        for node in nodes:
            replace_value(node.outputs[0], rewrite[node.op_type](node, separated))
            remove_dead([node])
        if nodes:
            import_domain(model, MICROSOFT)
        return PassResult(len(nodes))


def _product(node: ir.Node, separated: Separated) -> ir.Value:
    blocks = [_rows(node, index, separated) for index in range(1, len(node.inputs))]
    attributes = {name: found.value for name, found in node.attributes.items()}
    inputs = [node.inputs[0], *blocks]
    return insert(node, "BlockMatMul", inputs, attributes, domain=DSPARK, like=node.outputs[0]).outputs[0]


def _gather(node: ir.Node, separated: Separated) -> ir.Value:
    blocks = [_rows(node, index, separated) for index in range(1, len(node.inputs))]
    axis = add_initializer(owner(node), "last_of_three", np.array([2]))
    factors = [
        None if value is None else insert(node, "Unsqueeze", [value, axis], dtype=value.dtype).outputs[0]
        for value in blocks[1:]
    ]
    return gather_blocks(node, node, node.inputs[0], [blocks[0], *factors, *[None] * (2 - len(factors))])


def _rows(node: ir.Node, index: int, separated: Separated) -> ir.Value | None:
    """Input `index` of a node by rows: codes [N, G, P] or factors [N, G]."""
    value = node.inputs[index]
    if value is None or value.const_value is None:
        return None
    if value not in separated:
        separated[value] = _separate(node, value, tensor_dims(value.const_value))
    return separated[value]


def _separate(node: ir.Node, value: ir.Value, dims: tuple[int, ...]) -> ir.Value:
    graph, n = owner(node), attribute(node, "N", 0)
    perm, tail = ([0, 3, 1, 2, 4], [dims[1], 4 * dims[2]]) if len(dims) == 5 else ([0, 2, 1], [dims[1]])
    turned = insert(node, "Transpose", [value], {"perm": perm}, dtype=value.dtype)
    shape = add_initializer(graph, "by_rows_" + "_".join(map(str, tail)), np.array([-1, *tail]))
    rows = insert(node, "Reshape", [turned.outputs[0], shape], dtype=value.dtype, shape=[dims[0] * COLUMNS, *tail])
    if n == dims[0] * COLUMNS:
        return rows.outputs[0]
    ends = [add_initializer(graph, f"columns_{at}", np.array([at])) for at in (0, n)]
    inputs = [rows.outputs[0], *ends, ends[0]]
    return insert(node, "Slice", inputs, dtype=value.dtype, shape=[n, *tail]).outputs[0]
