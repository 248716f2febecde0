"""Small clean-ups of a traced graph: constants folded, sizes read from the token ids, known operators recognised."""

from __future__ import annotations

import onnx_ir as ir


def tidy_trace(model: ir.Model) -> None:
    """Fold constants and cancel what cancels, without touching a parameter; see the functions below for the rest."""
    from onnxscript.optimizer import optimize_ir

    parameters = {value for value in model.graph.initializers.values() if "." in str(value.name)}

    def keep_parameters(node: ir.Node) -> bool | None:
        return False if any(value in parameters for value in node.inputs) else None

    optimize_ir(model, should_fold=keep_parameters)
    _sizes_from_ids(model.graph)
    _rows_by_gather(model.graph)


def fuse_known(model: ir.Model) -> None:
    """Recognise RMSNormalization and RotaryEmbedding; merge what the layers compute in common."""
    from onnx_ir.passes.common import CommonSubexpressionEliminationPass, RemoveUnusedNodesPass
    from onnxscript.rewriter.onnx_fusions import fuse

    CommonSubexpressionEliminationPass()(model)
    fuse(model)
    CommonSubexpressionEliminationPass()(model)
    RemoveUnusedNodesPass()(model)


def _sizes_from_ids(graph: ir.Graph) -> None:
    """``Shape(k_pool.0)[0:1] -> Shape(input_ids)[0:1]``: batch and sequence sizes come from one input.

    The exporter reads a size from any input that has it, which would make one layer's nodes depend on another's pool.
    """
    ids = next(value for value in graph.inputs if value.name == "input_ids")
    axis_of = {str(axis): index for index, axis in enumerate(ids.shape or ())}
    for node in list(graph):
        source = node.inputs[0] if node.op_type == "Shape" else None
        if source is None or not source.is_graph_input() or source is ids or source.shape is None:
            continue
        start, end = node.attributes["start"].as_int(), node.attributes["end"].as_int()
        axis = axis_of.get(str(source.shape[start])) if end == start + 1 else None
        if axis is not None:
            node.replace_input_with(0, ids)
            node.attributes["start"] = ir.AttrInt64("start", axis)
            node.attributes["end"] = ir.AttrInt64("end", axis + 1)


def _rows_by_gather(graph: ir.Graph) -> None:
    """``Transpose(GatherND(Transpose(h), Unsqueeze(logit_rows))) -> Gather(h, logit_rows, axis=1)``."""
    rows = next(value for value in graph.inputs if value.name == "logit_rows")
    for node in [n for n in graph if n.op_type == "GatherND"]:
        swap, unsqueeze = (None if value is None else value.producer() for value in node.inputs[:2])
        users = [user for user, _ in node.outputs[0].uses()]
        if swap is None or unsqueeze is None or unsqueeze.inputs[0] is not rows or len(users) != 1:
            continue
        if not all(n.op_type == "Transpose" and tuple(n.attributes["perm"].value) == (1, 0, 2) for n in (swap, *users)):
            continue
        gather = ir.node("Gather", [swap.inputs[0], rows], {"axis": 1})
        after = users[0].outputs[0]
        gather.outputs[0].name, gather.outputs[0].type, gather.outputs[0].shape = "hidden_rows", after.type, after.shape
        graph.insert_before(users[0], gather)
        after.replace_all_uses_with(gather.outputs[0])
        graph.remove([users[0], node, unsqueeze, swap] if not _shared(swap, unsqueeze) else [users[0], node], safe=True)


def _shared(*nodes: ir.Node) -> bool:
    return any(len(node.outputs[0].uses()) > 1 for node in nodes)
