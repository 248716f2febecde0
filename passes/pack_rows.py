"""Let one run of a graph serve several sequences, each with as many rows as it has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from dsc.passes.base import GraphPass, PassResult, Reason
from dsc.passes.graph_edit import DSPARK, input_at, is_op

OFFSETS = "row_offsets"
_ATTENTION = ("QkvAttention", "VerifyAttention")
_INDEX = 8


@dataclass(frozen=True)
class PackRowsPass(GraphPass):
    """Give every attention node the graph input `row_offsets`, which says whose each row is.

    ::

        o, kp', vp' = QkvAttention(qkv[B, S, W], cos, sin, kp[B, ...], vp, past_lengths[B])
        ->
        o, kp', vp' = QkvAttention(qkv[1, S, W], cos, sin, kp[P, ...], vp, past_lengths[P], , , row_offsets[P + 1])

    Rows row_offsets[i] .. row_offsets[i + 1] - 1 belong to the sequence in slot i of the pools, so sequences with one
    row, with drafts and with a piece of a prompt share a run without padding. Attention alone looks at a row's
    sequence: everything else works on rows one by one.

    Rules:
        1. All attention nodes of the graph are the project's own and read the same `past_lengths`.
        2. Nothing else reads `past_lengths`: a graph that computes positions from it knows one sequence only.
    """

    name: ClassVar[str] = "pack-rows"

    def call(self, model: ir.Model) -> PassResult:
        """Pack, or say why not."""
        graph = model.graph
        nodes = [node for node in graph if node.domain == DSPARK and node.op_type in _ATTENTION]
        if not nodes or any(input_at(node, _INDEX) is not None for node in nodes):
            return PassResult()
        past = nodes[0].inputs[5]
        if why := _why_not(graph, nodes, past):
            return PassResult(0, (Reason("1-2", str(nodes[0].name), why),))
        offsets = ir.Value(name=OFFSETS, shape=ir.Shape(["offsets"]), type=ir.TensorType(ir.DataType.INT32))
        graph.inputs.append(offsets)
        for node in nodes:
            node.resize_inputs(_INDEX + 1)
            node.replace_input_with(_INDEX, offsets)
            for value in (*node.inputs[3:6], *node.outputs[1:]):
                if value is not None and value.shape is not None:
                    value.shape = ir.Shape(["slots", *value.shape[1:]])
        return PassResult(len(nodes))


def _why_not(graph: ir.Graph, nodes: list[ir.Node], past: ir.Value | None) -> str:
    if past is None or not past.is_graph_input() or any(node.inputs[5] is not past for node in nodes):
        return "the attention nodes do not read one graph input of lengths"
    if any(is_op(node, "GroupQueryAttention", "com.microsoft") for node in graph):
        return "some attention is not the project's own"
    others = [user for user, _ in past.uses() if user not in nodes]
    return f"{others[0].op_type} reads {past.name} as well" if others else ""
