"""One quantised matrix for a tied embedding and head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from dsc.passes.base import GraphPass, PassResult, Reason
from dsc.passes.graph_edit import (
    DSPARK,
    MICROSOFT,
    add_initializer,
    attribute,
    constant_array,
    import_domain,
    input_at,
    insert,
    is_op,
    is_weight,
    owner,
    remove_dead,
    replace_value,
    tensor_dims,
)

BY_BLOCK = ".by_block"
"""Ends the name of factors [N, G, 1] that hold the bytes of factors [N, G]."""


@dataclass(frozen=True)
class QuantizeEmbeddingPass(GraphPass):
    """Let an embedding read the blocks of the head it is tied to.

    ::

        e = Gather(E, ids); y = BlockMatMul(h, E.qweight, E.scales)
        ->
        e = Reshape(GatherBlockQuantized(E.qweight, ids, E.scales)); y = BlockMatMul(h, E.qweight, E.scales)

    The gathered rows are exactly the rows that the head multiplies by, so nothing is lost beyond what
    quantising the head lost, and the float matrix is gone from the bundle.

    Rules:
        1. The embedding's matrix was quantised for a product (``<name>.qweight``, ``<name>.scales`` exist).
        2. With minima, the gathered minima are added to each block.
        3. Otherwise the embedding keeps its float matrix: a gather reads a few rows, so it costs file size only.
    """

    name: ClassVar[str] = "quantize-embedding"

    def call(self, model: ir.Model) -> PassResult:
        """Replace gathers from a float matrix whose blocks are in the graph."""
        fired = 0
        skipped: list[Reason] = []
        for node in tuple(model.graph):
            table = input_at(node, 0)
            if table is None or not is_op(node, "Gather") or not is_weight(table) or attribute(node, "axis", 0):
                continue
            if table.const_value is None or len(table.const_value.shape) != 2:
                continue
            qweight = model.graph.initializers.get(f"{table.name}.qweight")
            if qweight is None:
                skipped.append(Reason("3", str(table.name), "no product uses the quantised matrix"))
                continue
            _gather_blocks(node, table, qweight)
            fired += 1
        if fired:
            import_domain(model, MICROSOFT)
        return PassResult(fired, tuple(skipped))


def _gather_blocks(node: ir.Node, table: ir.Value, qweight: ir.Value) -> None:
    graph, output = owner(node), node.outputs[0]
    if qweight.const_value is None:
        raise ValueError(f"{qweight.name!r} has no content")
    user = next(node for node, _ in qweight.uses() if is_op(node, "BlockMatMul", DSPARK))
    mins = input_at(user, 3)
    # The operator wants as many axes in the scales as in the data; the bytes are those of the head's scales.
    factors = [_with_unit_axis(graph, user.inputs[2]), None if mins is None else _with_unit_axis(graph, mins)]
    replace_value(output, gather_blocks(node, user, node.inputs[1], [qweight, *factors]))
    remove_dead([node])
    if not table.uses():
        graph.initializers.pop(str(table.name))


def gather_blocks(
    anchor: ir.Node, product: ir.Node, ids: ir.Value | None, blocks: Sequence[ir.Value | None]
) -> ir.Value:
    """Rows `ids` [B, S] of a product's matrix as float32 [B, S, K], by nodes before `anchor`.

    Args:
        product: its attributes `bits`, `block` and `K` describe the matrix.
        blocks: codes [N, G, P], scales [N, G, 1] and minima [N, G, 1] or None.
    """
    qweight, scales, mins = blocks
    bits, block, k = (attribute(product, name, 0) for name in ("bits", "block", "K"))
    dtype = anchor.outputs[0].dtype
    attributes = {"bits": bits, "block_size": block, "gather_axis": 0, "quantize_axis": 2}
    gather = insert(anchor, "GatherBlockQuantized", [qweight, ids, scales], attributes, domain=MICROSOFT, dtype=dtype)
    rows = gather.outputs[0]
    if mins is not None:
        shifts = insert(anchor, "Gather", [mins, ids], {"axis": 0}, dtype=dtype)
        rows = insert(anchor, "Add", [rows, shifts.outputs[0]], dtype=dtype).outputs[0]
    flat = add_initializer(owner(anchor), f"embedding_width_{k}", np.array([0, 0, k]))
    return insert(anchor, "Reshape", [rows, flat], dtype=dtype).outputs[0]


def _with_unit_axis(graph: ir.Graph, value: ir.Value | None) -> ir.Value:
    """[N, K/block] seen as [N, K/block, 1]: another shape over the same bytes, so it is stored once."""
    array = constant_array(value, max_elements=1 << 40)
    if value is None or array is None or value.const_value is None:
        raise ValueError("the blocks have no content")
    return add_initializer(graph, f"{value.name}{BY_BLOCK}", array.reshape(*tensor_dims(value.const_value), 1))
