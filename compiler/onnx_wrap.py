"""Bring a decoder graph that takes past and returns present keys and values to the forward-graph convention.

Nothing between its inputs and outputs is changed, so it computes what it computed:

- the attention mask is what any caller would give for sequences without padding, all ones;
- GroupQueryAttention over a shared buffer appends in place already, and gets the pools as they are;
- a cache that the graph concatenates is cut out of the pool, and the rows that are new in its result are written back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dsc.bundle_schema.errors import ModelError
from dsc.compiler.onnx_ports import POOL_NAMES, CacheLayer, GraphPorts
from dsc.passes.graph_edit import MICROSOFT, add_initializer, attribute, input_at, insert, is_op, producer

if TYPE_CHECKING:
    import onnx_ir as ir

OPSET, OLDEST_OPSET = 23, 18
_PAST_INPUTS = {("", "Attention"): (4, 5), (MICROSOFT, "MultiHeadAttention"): (6, 7)}
"""Operators that append to a cache themselves: where they take past keys and values; they return them as 1 and 2."""

_SAME_TYPE = (
    "FusedMatMul",
    "GroupQueryAttention",
    "MatMulNBits",
    "MultiHeadAttention",
    "RotaryEmbedding",
    "SkipSimplifiedLayerNormalization",
)
"""onnxruntime's operators whose results have the element type of what they read."""


def upgrade_operators(model: ir.Model, where: str) -> None:
    """Operators as of opset 23, which the passes write and read.

    Raises:
        ModelError: the opset is too old to be converted without a change of meaning.
    """
    from onnxscript.version_converter import ConvertVersionPass

    opset = model.opset_imports.get("", 0)
    if opset < OLDEST_OPSET:
        raise ModelError(
            where, f"opset {OLDEST_OPSET} or newer is required, got {opset}", "export again with a newer opset"
        )
    if opset < OPSET:
        ConvertVersionPass(OPSET)(model)
    _name_norms(model)


def _name_norms(model: ir.Model) -> None:
    """onnxruntime's older name of RMSNormalization, which only onnxruntime knows."""
    for node in model.graph.all_nodes():
        if is_op(node, "SimplifiedLayerNormalization") and len(node.outputs) == 1:
            node.op_type = "RMSNormalization"


def infer_types(model: ir.Model) -> None:
    """Types of inner values, where the exporter left them out: later passes put in operators that only dsc knows."""
    from onnx_ir.passes.common import ShapeInferencePass

    activations = next(value.type for value in model.graph.inputs if value.name == POOL_NAMES.past_key % 0)
    for node in model.graph.all_nodes():
        if node.domain == MICROSOFT and node.op_type in _SAME_TYPE:
            for output in node.outputs:
                output.type = output.type or (activations if output.name else None)
    ShapeInferencePass(strict_mode=False)(model)


def to_pools(model: ir.Model, ports: GraphPorts, heads: Sequence[tuple[int, int]], where: str) -> None:
    """Give a past-and-present graph the inputs and outputs of a forward graph.

    Args:
        heads: key-value heads and head size of each layer.

    Raises:
        ModelError: a cache is used in a way that cannot be brought to a pool; the output is named.
    """
    graph = model.graph
    in_place = [appends_in_place(layer) for layer in ports.layers]
    _name_axes(graph, "batch" if all(in_place) else 1, where)
    inputs = {str(value.name): value for value in graph.inputs}
    step = _Step(graph, inputs["input_ids"])
    if "attention_mask" in inputs:
        _replace_mask(inputs["attention_mask"], step, where)
    pools: list[ir.Value] = []
    pools_out: list[ir.Value] = []
    for index, (layer, buffer) in enumerate(zip(ports.layers, in_place, strict=True)):
        k_in, k_out = _to_pool(layer.past_key, layer.present_key, buffer, step, where)
        v_in, v_out = _to_pool(layer.past_value, layer.present_value, buffer, step, where)
        names = (POOL_NAMES.past_key, POOL_NAMES.past_value, POOL_NAMES.present_key, POOL_NAMES.present_value)
        for value, name in zip((k_in, v_in, k_out, v_out), names, strict=True):
            value.name = name % index
            value.shape = _shape([step.batch, heads[index][0], "max_rows", heads[index][1]])
        pools += [k_in, v_in]
        pools_out += [k_out, v_out]
    rows, logits = _select_rows(graph, step.batch)
    positions = [inputs["position_ids"]] if "position_ids" in inputs else []
    graph.inputs[:] = [inputs["input_ids"], *positions, rows, step.past, *pools]
    graph.outputs[:] = [logits, *pools_out]


def appends_in_place(layer: CacheLayer) -> bool:
    """Whether one GroupQueryAttention takes the layer's cache as a buffer and returns it."""
    users = [node for node, _ in layer.past_key.uses()]
    if len(users) != 1 or not is_op(users[0], "GroupQueryAttention", MICROSOFT):
        return False
    node = users[0]
    cache = (input_at(node, 3), input_at(node, 4), *node.outputs[1:3])
    return cache == (layer.past_key, layer.past_value, layer.present_key, layer.present_value)


class _Step:
    """Values that every layer needs, computed from the inputs before anything else.

    Attributes:
        batch: the batch axis: a name, or 1 where a cache is cut at one length for all sequences.
        past: int32 [B], the new input.
        ends: int64 [B], rows of each sequence after this call.
        longest_past, total: int64 [1], of the longest sequence before and after this call.
    """

    def __init__(self, graph: ir.Graph, ids: ir.Value) -> None:
        import onnx_ir as ir

        int32, int64 = ir.DataType.INT32, ir.DataType.INT64
        first = next(iter(graph))
        assert ids.shape is not None
        self.graph, self.anchor = graph, first
        self.batch: int | str = ids.shape[0] if isinstance(ids.shape[0], int) else str(ids.shape[0])
        self.past = ir.Value(name="past_lengths", shape=_shape([self.batch]), type=ir.TensorType(int32))
        past = insert(first, "Cast", [self.past], {"to": int64.value}, dtype=int64, shape=[self.batch]).outputs[0]
        seq = insert(first, "Shape", [ids], {"start": 1, "end": 2}, dtype=int64, shape=[1]).outputs[0]
        self.ends = insert(first, "Add", [past, seq], dtype=int64, shape=[self.batch]).outputs[0]
        self.longest_past, self.total = (
            insert(first, "ReduceMax", [lengths], {"keepdims": 1}, dtype=int64, shape=[1]).outputs[0]
            for lengths in (past, self.ends)
        )

    def constant(self, name: str, content: int | list[int]) -> ir.Value:
        """A small int64 constant, made once."""
        return add_initializer(self.graph, name, np.array(content, np.int64))

    def positions(self, start: ir.Value, end: ir.Value, anchor: ir.Node) -> ir.Value:
        """start, start + 1, ... end - 1, int64 [n]."""
        import onnx_ir as ir

        bounds = [
            insert(anchor, "Squeeze", [bound], dtype=ir.DataType.INT64, shape=[]).outputs[0] for bound in (start, end)
        ]
        counted = insert(anchor, "Range", [*bounds, self.constant("one_i64", 1)], dtype=ir.DataType.INT64)
        return counted.outputs[0]


def _replace_mask(mask: ir.Value, step: _Step, where: str) -> None:
    """[B, total]: 1 for every row that a sequence has after this call."""
    import onnx_ir as ir

    kinds = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL)
    if mask.dtype not in kinds or mask.shape is None or len(mask.shape) != 2:
        raise ModelError(
            f"{where}: input 'attention_mask'",
            f"integers [batch, positions] are required, got {mask.dtype} {mask.shape}",
        )
    columns = step.positions(step.constant("zero_i64_1", [0]), step.total, step.anchor)
    ends = insert(step.anchor, "Unsqueeze", [step.ends, step.constant("one_i64_1", [1])])
    seen = insert(step.anchor, "Less", [columns, ends.outputs[0]], dtype=ir.DataType.BOOL)
    made = insert(step.anchor, "Cast", seen.outputs, {"to": mask.dtype.value}, dtype=mask.dtype, shape=mask.shape)
    mask.replace_all_uses_with(made.outputs[0])


def _to_pool(past: ir.Value, present: ir.Value, in_place: bool, step: _Step, where: str) -> tuple[ir.Value, ir.Value]:
    """The pool's value before the call and after it."""
    if in_place:
        return past, present
    _require_append(past, present, where)
    import onnx_ir as ir

    pool = ir.Value(type=past.type)
    axis = step.constant("two_i64_1", [2])
    zero = step.constant("zero_i64_1", [0])
    cut = insert(step.anchor, "Slice", [pool, zero, step.longest_past, axis], like=past)
    past.replace_all_uses_with(cut.outputs[0])
    end = ir.node("Identity", [present])  # where the writing back goes
    step.graph.append(end)
    new = insert(end, "Slice", [present, step.longest_past, step.total, axis], dtype=past.dtype).outputs[0]
    rows = step.positions(step.longest_past, step.total, end)
    column = insert(end, "Reshape", [rows, step.constant("rows_axis", [1, 1, -1, 1])], dtype=ir.DataType.INT64)
    shape = insert(end, "Shape", [new], dtype=ir.DataType.INT64, shape=[4])
    at = insert(end, "Expand", [column.outputs[0], shape.outputs[0]], dtype=ir.DataType.INT64)
    written = insert(end, "ScatterElements", [pool, at.outputs[0], new], {"axis": 2}, dtype=past.dtype)
    step.graph.remove(end, safe=True)
    present.name = f"{present.name}_rows"
    return pool, written.outputs[0]


def _require_append(past: ir.Value, present: ir.Value, where: str) -> None:
    """Refuse a cache that is more than its past rows followed by the new ones."""
    step = producer(present)
    taken = None
    if step is not None and is_op(step, "Concat") and attribute(step, "axis", 0) in (2, -2) and len(step.inputs) == 2:
        taken = step.inputs[0]
    elif step is not None and (step.domain, step.op_type) in _PAST_INPUTS and present in step.outputs[1:3]:
        taken = input_at(step, _PAST_INPUTS[step.domain, step.op_type][step.outputs.index(present) - 1])
    if taken is not past:
        made = "nothing" if step is None else f"{step.op_type} {step.name!r}"
        raise ModelError(
            f"{where}: output {present.name!r}",
            f"{past.name!r} with the new rows appended is required (GroupQueryAttention over a buffer, Concat on axis 2"
            f" or an operator that does the same), it is made by {made}",
        )


def _select_rows(graph: ir.Graph, batch: int | str) -> tuple[ir.Value, ir.Value]:
    """The input `logit_rows`, and the logits of these rows in float32."""
    import onnx_ir as ir

    every = next(value for value in graph.outputs if value.name == "logits")
    every.name = "logits_of_every_row"
    assert every.shape is not None
    rows = ir.Value(name="logit_rows", shape=_shape(["rows"]), type=ir.TensorType(ir.DataType.INT64))
    node = ir.node("Gather", [every, rows], {"axis": 1})
    graph.append(node)
    node.outputs[0].type = every.type
    if every.dtype is not ir.DataType.FLOAT:
        node.outputs[0].shape = _shape([batch, "rows", every.shape[2]])
        node = ir.node("Cast", node.outputs, {"to": ir.DataType.FLOAT.value})
        graph.append(node)
    logits = node.outputs[0]
    logits.name, logits.type = "logits", ir.TensorType(ir.DataType.FLOAT)
    logits.shape = _shape([batch, "rows", every.shape[2]])
    return rows, logits


def _name_axes(graph: ir.Graph, batch: int | str, where: str) -> None:
    """Call the axes of sequences and positions what a forward graph calls them, wherever they appear."""
    ids = next(value for value in graph.inputs if value.name == "input_ids")
    assert ids.shape is not None
    batch_size, n_positions = ids.shape
    if (isinstance(batch_size, int) and batch_size != 1) or isinstance(n_positions, int):
        raise ModelError(
            f"{where}: input 'input_ids'", f"[batch, positions] of any length are required, got {ids.shape}"
        )
    batch = 1 if batch_size == 1 else batch
    old = {str(dim): new for dim, new in zip(ids.shape, (batch, "seq"), strict=True) if getattr(dim, "value", None)}
    ids.shape = _shape([batch, "seq"])
    values = [*graph.inputs, *(output for node in graph.all_nodes() for output in node.outputs)]
    for value in values:
        if value.shape is not None:
            value.shape = _shape([dim if isinstance(dim, int) else old.get(str(dim), dim) for dim in value.shape])


def _shape(dims: Sequence[int | str | ir.SymbolicDim | None]) -> ir.Shape:
    import onnx_ir as ir

    return ir.Shape(dims)
