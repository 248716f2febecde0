"""Logits of the requested rows only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from dsc.bundle_schema.errors import PassError
from dsc.passes.base import GraphPass, PassResult
from dsc.passes.graph_edit import attribute, insert, is_op, producer, remove_dead, replace_value
from dsc.passes.matmul_weights import find_matmul_weight

ROWS = "logit_rows"
_BLOCK_PRODUCTS = ("BlockMatMul", "MatMulNBits")
_ELEMENTWISE = ("Cast", "Mul", "Div", "Tanh", "Add", "Identity")


@dataclass(frozen=True)
class SelectLogitRowsPass(GraphPass):
    """Multiply only the rows whose logits are wanted by the head, never a whole prompt's.

    ::

        logits[B, S, V] = head(h[B, S, H])             ->  logits[B, R, V] = head(Gather(h, logit_rows, axis=1))
        logits = Gather(head(h), logit_rows, axis=1)   ->  logits = head(Gather(h, logit_rows, axis=1))

    Rules:
        1. A graph without the input `logit_rows` gets it, int64 [rows].
        2. A selection after the head moves before it.
        3. A selection before the head stays.
    """

    name: ClassVar[str] = "select-logit-rows"

    def call(self, model: ir.Model) -> PassResult:
        """Apply the one rule that fits."""
        graph = model.graph
        head, late = _find_head(graph)
        if _selected(head):
            return PassResult()
        rows = next((value for value in graph.inputs if value.name == ROWS), None)
        if rows is None:
            rows = ir.Value(name=ROWS, shape=ir.Shape(["rows"]), type=ir.TensorType(ir.DataType.INT64))
            graph.inputs.append(rows)
        _select_before(head, rows)
        if late is not None and late.inputs[0] is not None:
            replace_value(late.outputs[0], late.inputs[0])
            remove_dead([late])
        return PassResult(1)

    def ensures(self, model: ir.Model) -> None:
        """The head reads selected rows."""
        head, late = _find_head(model.graph)
        if late is not None or not _selected(head):
            raise PassError("output 'logits'", "is computed for every position instead of the requested ones")


def _find_head(graph: ir.Graph) -> tuple[ir.Node, ir.Node | None]:
    """The head's product, and the selection after it when there is one; shapes on the way become [B, rows, V]."""
    step = producer(next((output for output in graph.outputs if output.name == "logits"), None))
    late: ir.Node | None = None
    while step is not None and find_matmul_weight(step) is None and step.op_type not in _BLOCK_PRODUCTS:
        if is_op(step, "Gather") and attribute(step, "axis", 0) == 1:
            late = step
        elif step.op_type not in _ELEMENTWISE:
            step = None
            break
        step = producer(step.inputs[0])
    if step is None:
        raise PassError("output 'logits'", "required a product with a constant matrix, found none behind it")
    return step, late


def _selected(head: ir.Node) -> bool:
    """Whether the head's input is a selection of rows by `logit_rows`."""
    step = producer(head.inputs[0])
    while step is not None and step.op_type in (*_ELEMENTWISE, "RMSNormalization"):
        step = producer(step.inputs[0])
    if step is None or not is_op(step, "Gather") or attribute(step, "axis", 0) != 1:
        return False
    index = step.inputs[1]
    while index is not None and not index.is_graph_input():
        before = producer(index)
        index = before.inputs[0] if before is not None and before.op_type == "Reshape" else None
    return index is not None and index.name == ROWS


def _select_before(head: ir.Node, rows: ir.Value) -> None:
    hidden = head.inputs[0]
    if hidden is None:
        raise PassError(f"node {head.name!r}", "the head has no input")
    selected = insert(head, "Gather", [hidden, rows], {"axis": 1}, dtype=hidden.dtype).outputs[0]
    if hidden.shape is not None:
        selected.shape = ir.Shape([hidden.shape[0], "rows", hidden.shape[2]])
    head.replace_input_with(0, selected)
    value = head.outputs[0]
    while True:
        if value.shape is not None and len(value.shape) == 3:
            value.shape = ir.Shape([value.shape[0], "rows", value.shape[2]])
        users = [node for node, _ in value.uses() if node.op_type in _ELEMENTWISE]
        if value.is_graph_output() or not users:
            return
        value = users[0].outputs[0]
