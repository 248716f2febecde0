"""ai.dspark::VerifyAttention as onnxruntime's GroupQueryAttention, which updates the KV pool in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import onnx_ir as ir

from dsc.bundle_schema.errors import PassError
from dsc.passes.attention_inputs import side_by_side
from dsc.passes.base import GraphPass, PassResult, Reason
from dsc.passes.graph_edit import (
    DSPARK,
    MICROSOFT,
    add_initializer,
    attribute,
    import_domain,
    input_at,
    insert,
    is_op,
    owner,
    producer,
    static_dims,
)
from dsc.passes.heads_layout import flat_heads, take_attention_outputs
from dsc.passes.rotary_table import RotaryTable, find_rotary_table


@dataclass(frozen=True)
class LowerAttentionPass(GraphPass):
    """Replace every VerifyAttention by com.microsoft::GroupQueryAttention.

    ::

        q = RotaryEmbedding(Transpose(Reshape(q2)), cos, sin); k = ...; v = Transpose(Reshape(v2))
        o, kp', vp' = VerifyAttention(q, k, v, kp, vp, past_lengths)        y = Reshape(Transpose(o))
        ->
        last = past_lengths + S - 1; total = max(last) + 1                                 once a graph
        y, kp', vp' = GroupQueryAttention(q2, k2, v2, kp, vp, last, total, cos_table, sin_table, position_ids)

    The operator wants the old and the new pool to be the same memory; the caller binds them so. It takes
    several sequences at once only while each brings one new position or none has a past.

    Rules:
        1. The flat projections are used directly; Transpose and Reshape around attention go. RotaryEmbedding
           works on the flat form, RMSNormalization of q and k before the transpose.
        2. Window, softcap, scale and sinks become local_window_size, softcap, scale and head_sink; a tree
           mask becomes attention_bias, zero over the past.
        3. With `fold_rotary`, a rotary embedding whose cos and sin are a constant table indexed by positions
           moves into the operator, with a table of `max_positions` rows. Otherwise RotaryEmbedding stays.
        4. q2, k2 and v2 that are the parts of one value, in this order, are given as that value (see merge-qkv).
    """

    name: ClassVar[str] = "lower-attention"

    fold_rotary: bool = False
    max_positions: int = 8192

    def call(self, model: ir.Model) -> PassResult:
        """Lower every VerifyAttention of the main graph."""
        nodes = [node for node in model.graph if is_op(node, "VerifyAttention", DSPARK)]
        skipped: list[Reason] = []
        lengths: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
        for node in nodes:
            past = node.inputs[5]
            if past is None:
                raise PassError(f"node {node.name!r}", "VerifyAttention has no past_lengths")
            if past not in lengths:
                lengths[past] = _lengths(model.graph, nodes[0], past)
            skipped += self._lower(node, *lengths[past])
        if nodes:
            import_domain(model, MICROSOFT)
        return PassResult(len(nodes), tuple(skipped))

    def ensures(self, model: ir.Model) -> None:
        """No VerifyAttention is left."""
        left = [node.name for node in model.graph if is_op(node, "VerifyAttention", DSPARK)]
        if left:
            raise PassError(f"node {left[0]!r}", "VerifyAttention was not lowered")

    def _lower(self, node: ir.Node, last: ir.Value, total: ir.Value) -> list[Reason]:
        n_heads, head_dim = _heads(node, 0)
        n_kv_heads, _ = _heads(node, 1)
        query, key, value = (_required(node, index) for index in range(3))
        table = _common_table(query, key) if self.fold_rotary else "fold_rotary is off"
        rotary: list[ir.Value | None] = [None, None, None]
        attributes = _attributes(node, n_heads, n_kv_heads)
        if isinstance(table, RotaryTable):
            attributes |= {"do_rotary": 1, "rotary_interleaved": _interleaved(query)}
            rotary = [*self._table_values(owner(node), table), table.positions]
            query, key = _required(_producer(query), 0), _required(_producer(key), 0)
        flat: list[ir.Value | None] = [
            flat_heads(query, node, n_heads, head_dim),
            flat_heads(key, node, n_kv_heads, head_dim),
            flat_heads(value, node, n_kv_heads, head_dim),
        ]
        packed = side_by_side(flat)
        inputs = [
            *(flat if packed is None else [packed, None, None]),
            node.inputs[3],
            node.inputs[4],
            last,
            total,
            *rotary,
            _tree_bias(node, last),
            input_at(node, 6),
        ]
        lowered = insert(node, "GroupQueryAttention", _trim(inputs), attributes, domain=MICROSOFT, num_outputs=3)
        take_attention_outputs(node, lowered, n_heads, head_dim)
        return [] if isinstance(table, RotaryTable) else [Reason("3", str(node.name), table)]

    def _table_values(self, graph: ir.Graph, table: RotaryTable) -> tuple[ir.Value, ir.Value]:
        """The two caches as initializers, one pair for each set of frequencies in the graph."""
        cos, sin = table.rows(self.max_positions)
        for name in list(graph.initializers):
            if name.startswith("rotary_cos") and _same(graph.initializers[name], cos):
                return graph.initializers[name], graph.initializers[name.replace("cos", "sin", 1)]
        number = sum(name.startswith("rotary_cos") for name in graph.initializers)
        return (
            add_initializer(graph, f"rotary_cos.{number}", cos),
            add_initializer(graph, f"rotary_sin.{number}", sin),
        )


def _lengths(graph: ir.Graph, anchor: ir.Node, past: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Index of each sequence's last row after this call, int32 [B], and the longest total, int32 scalar."""
    ids = next((value for value in graph.inputs if value.name == "input_ids"), graph.inputs[0])
    int32 = ir.DataType.INT32
    one = add_initializer(graph, "one_i32", np.array(1, np.int32))
    first = next(iter(graph), anchor)  # only graph inputs are needed, so every layer can use it
    seq = insert(first, "Shape", [ids], {"start": 1, "end": 2}, dtype=ir.DataType.INT64, shape=[1])
    seq32 = insert(first, "Cast", seq.outputs, {"to": int32.value}, dtype=int32, shape=[1])
    added = insert(first, "Sub", [seq32.outputs[0], one], dtype=int32, shape=[1])
    last = insert(first, "Add", [past, added.outputs[0]], dtype=int32, shape=past.shape)
    longest = insert(first, "ReduceMax", last.outputs, {"keepdims": 0}, dtype=int32, shape=[])
    total = insert(first, "Add", [longest.outputs[0], one], dtype=int32, shape=[])
    return last.outputs[0], total.outputs[0]


def _attributes(node: ir.Node, n_heads: int, n_kv_heads: int) -> dict[str, Any]:
    attributes: dict[str, Any] = {"num_heads": n_heads, "kv_num_heads": n_kv_heads}
    attributes["scale"] = attribute(node, "scale", 0.0)
    window, softcap = attribute(node, "window", -1), attribute(node, "softcap", 0.0)
    if window > 0:
        attributes["local_window_size"] = window
    if softcap:
        attributes["softcap"] = softcap
    return attributes


def _tree_bias(node: ir.Node, last: ir.Value) -> ir.Value | None:
    """The tree mask [B, 1, S, S] as an additive bias [B, 1, S, past + S]; every node sees the past."""
    mask = input_at(node, 7)
    if mask is None:
        return None
    graph, dtype = owner(node), _required(node, 0).dtype or ir.DataType.FLOAT
    numpy_type = dtype.numpy()
    zero = add_initializer(graph, "tree_zero", np.array(0, numpy_type))
    lowest = add_initializer(graph, "tree_lowest", np.array(np.finfo(numpy_type).min, numpy_type))
    pads_before = add_initializer(graph, "tree_no_pads", np.zeros(3, np.int64))
    pads_after = add_initializer(graph, "tree_no_pads_after", np.zeros(4, np.int64))
    among = insert(node, "Where", [mask, zero, lowest], dtype=dtype, shape=mask.shape)
    past = insert(node, "Cast", [node.inputs[5]], {"to": ir.DataType.INT64.value}, dtype=ir.DataType.INT64)
    longest = insert(node, "ReduceMax", past.outputs, {"keepdims": 1}, dtype=ir.DataType.INT64, shape=[1])
    pads = insert(
        node,
        "Concat",
        [pads_before, longest.outputs[0], pads_after],
        {"axis": 0},
        dtype=ir.DataType.INT64,
        shape=[8],
    )
    bias = insert(node, "Pad", [among.outputs[0], pads.outputs[0], zero], dtype=dtype)
    return bias.outputs[0]


def _common_table(query: ir.Value, key: ir.Value) -> RotaryTable | str:
    """The table that rotates both q and k, or why the operator cannot do it."""
    rotations = [producer(query), producer(key)]
    if not all(is_op(step, "RotaryEmbedding") and len(step.inputs) == 3 for step in rotations if step is not None):
        return "q and k do not both come from a RotaryEmbedding"
    if None in rotations or _interleaved(query) != _interleaved(key):
        return "q and k do not both come from the same kind of RotaryEmbedding"
    tables = [find_rotary_table(step.inputs[1], step.inputs[2]) for step in rotations if step is not None]
    for table in tables:
        if isinstance(table, str):
            return table
    one, other = (table for table in tables if isinstance(table, RotaryTable))
    if one.positions is not other.positions or not np.array_equal(one.frequencies, other.frequencies):
        return "q and k are rotated by different tables"
    return one


def _heads(node: ir.Node, index: int) -> tuple[int, int]:
    """Number of heads and head size of q (0) or k (1)."""
    dims = static_dims(_required(node, index))
    if dims is None or len(dims) != 4 or dims[1] is None or dims[3] is None:
        raise PassError(f"node {node.name!r}", f"input {index} must be [B, heads, S, head size] with both fixed")
    return dims[1], dims[3]


def _required(node: ir.Node, index: int) -> ir.Value:
    value = input_at(node, index)
    if value is None:
        raise PassError(f"node {node.name!r}", f"{node.op_type} has no input {index}")
    return value


def _producer(value: ir.Value) -> ir.Node:
    step = producer(value)
    if step is None:
        raise PassError(f"value {value.name!r}", "nothing computes it")
    return step


def _interleaved(value: ir.Value) -> int:
    return attribute(_producer(value), "interleaved", 0)


def _same(value: ir.Value, array: Any) -> bool:
    tensor = value.const_value
    return tensor is not None and tuple(tensor.shape) == array.shape and bool(np.array_equal(tensor.numpy(), array))


def _trim(inputs: list[ir.Value | None]) -> list[ir.Value | None]:
    while inputs and inputs[-1] is None:
        inputs.pop()
    return inputs
