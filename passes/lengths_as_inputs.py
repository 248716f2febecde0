"""The lengths that GroupQueryAttention reads become graph inputs, so that nothing has to go from device to host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from dsc.bundle_schema.errors import PassError
from dsc.passes.base import GraphPass, PassResult
from dsc.passes.graph_edit import MICROSOFT, is_op, producer, remove_dead, replace_value

LAST_ROWS = "last_rows"
TOTAL_LENGTH = "total_length"
_LAST, _TOTAL = 5, 6  # inputs of GroupQueryAttention


@dataclass(frozen=True)
class LengthsAsInputsPass(GraphPass):
    """Let the caller state the lengths, which it knows, instead of computing them from `past_lengths`.

    ::

        last = past_lengths + S - 1; total = max(last) + 1
        y, kp', vp' = GroupQueryAttention(q, k, v, kp, vp, last, total, ...)
        ->
        y, kp', vp' = GroupQueryAttention(q, k, v, kp, vp, last_rows, total_length, ...)

    The operator takes the first on the device and the second on the host. onnxruntime would compute both on the host
    and copy the first to the device in every run.

    Rules:
        1. `last_rows` int32 [batch] is the index of each sequence's last row after the call.
        2. `total_length` int32, a scalar, is the longest sequence's rows after the call.
        3. `past_lengths` goes when nothing else reads it.
    """

    name: ClassVar[str] = "lengths-as-inputs"

    def call(self, model: ir.Model) -> PassResult:
        """Replace the lengths of every GroupQueryAttention."""
        graph = model.graph
        nodes = [node for node in graph if is_op(node, "GroupQueryAttention", MICROSOFT)]
        fired = 0
        for index, name, shape in ((_LAST, LAST_ROWS, ["batch"]), (_TOTAL, TOTAL_LENGTH, [])):
            values = {node.inputs[index] for node in nodes}
            if len(values) > 1 or None in values:
                raise PassError(f"input {index} of GroupQueryAttention", "every layer must have the same one")
            for value in values:
                fired += _replace(graph, value, ir.Value(name=name, shape=ir.Shape(shape)))
        past = next((value for value in graph.inputs if value.name == "past_lengths"), None)
        if nodes and past is not None and not past.uses():
            graph.inputs.remove(past)
        return PassResult(fired)

    def ensures(self, model: ir.Model) -> None:
        """Every GroupQueryAttention reads the inputs."""
        for node in model.graph:
            if is_op(node, "GroupQueryAttention", MICROSOFT):
                names = [value.name if value is not None else None for value in node.inputs[_LAST : _TOTAL + 1]]
                if names != [LAST_ROWS, TOTAL_LENGTH]:
                    raise PassError(f"node {node.name!r}", f"reads the lengths {names}")


def _replace(graph: ir.Graph, value: ir.Value | None, new: ir.Value) -> int:
    """Make `new` a graph input in place of a computed `value`; returns whether there was one."""
    computed = producer(value)
    if value is None or computed is None:
        return 0
    graph.inputs.append(new)
    replace_value(value, new)
    remove_dead([computed])
    return 1
