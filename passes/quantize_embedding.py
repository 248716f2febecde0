"""One quantised matrix for a tied embedding and head."""

from __future__ import annotations

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
    graph, ids, output = owner(node), node.inputs[1], node.outputs[0]
    if ids is None or qweight.const_value is None:
        raise ValueError(f"node {node.name!r} or {qweight.name!r} is incomplete")
    user = next(node for node, _ in qweight.uses() if is_op(node, "BlockMatMul", DSPARK))
    block, bits, k = (attribute(user, name, 0) for name in ("block", "bits", "K"))
    scales, mins = user.inputs[2], input_at(user, 3)
    # The operator wants as many axes in the scales as in the data; the bytes are those of the head's scales.
    scales3 = _with_unit_axis(graph, scales)
    attributes = {"bits": bits, "block_size": block, "gather_axis": 0, "quantize_axis": 2}
    rows = insert(
        node, "GatherBlockQuantized", [qweight, ids, scales3], attributes, domain=MICROSOFT, dtype=output.dtype
    ).outputs[0]
    if mins is not None:
        shifts = insert(node, "Gather", [_with_unit_axis(graph, mins), ids], {"axis": 0}, dtype=output.dtype)
        rows = insert(node, "Add", [rows, shifts.outputs[0]], dtype=output.dtype).outputs[0]
    flat = add_initializer(graph, f"embedding_width_{k}", np.array([0, 0, k]))
    replace_value(output, insert(node, "Reshape", [rows, flat], dtype=output.dtype).outputs[0])
    remove_dead([node])
    if not table.uses():
        graph.initializers.pop(str(table.name))


def _with_unit_axis(graph: ir.Graph, value: ir.Value | None) -> ir.Value:
    """[N, K/block] seen as [N, K/block, 1]: another shape over the same bytes, so it is stored once."""
    array = constant_array(value, max_elements=1 << 40)
    if value is None or array is None or value.const_value is None:
        raise ValueError("the blocks have no content")
    return add_initializer(graph, f"{value.name}.by_block", array.reshape(*tensor_dims(value.const_value), 1))
