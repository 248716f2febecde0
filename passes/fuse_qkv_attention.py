"""Rotary embedding and attention over one packed projection: one node a layer for the native kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from dsc.passes.attention_inputs import HeadsInput, Rotation, heads_input, side_by_side
from dsc.passes.base import GraphPass, PassResult, Reason
from dsc.passes.graph_edit import DSPARK, input_at, insert, is_op, static_dims
from dsc.passes.heads_layout import take_attention_outputs


@dataclass(frozen=True)
class FuseQkvAttentionPass(GraphPass):
    """Let one node split, turn and attend to the packed projection of a layer.

    ::

        q2, k2, v2 = Split(qkv); q = RotaryEmbedding(Transpose(Reshape(q2)), cos, sin); k = ...; v = ...
        o, kp', vp' = VerifyAttention(q, k, v, kp, vp, past_lengths); y = Reshape(Transpose(o))
        ->
        y, kp', vp' = QkvAttention(qkv, cos, sin, kp, vp, past_lengths)

    Run after merge-qkv, which makes the packed projection. Window, softcap, scale, sinks and tree mask stay.

    Rules:
        1. Queries, keys and values are the parts of one value [B, S, (Hq + 2 Hkv) D], in this order, float32.
        2. One rotary embedding of the "rotate half" form turns queries and keys, whole or their first elements;
           its cosines and sines may be any values. Nothing else stands between projection and attention: a
           normalisation of queries and keys does in some models.
        3. Values are as wide as keys.
    """

    name: ClassVar[str] = "fuse-qkv-attention"

    def call(self, model: ir.Model) -> PassResult:
        """Fuse layer by layer."""
        fired = 0
        skipped: list[Reason] = []
        for node in tuple(model.graph):
            if not is_op(node, "VerifyAttention", DSPARK):
                continue
            why = _fuse(node)
            fired += not why
            skipped += [Reason("1-3", str(node.name), why)] if why else []
        return PassResult(fired, tuple(skipped))


def _fuse(node: ir.Node) -> str:
    """Fuse one attention node, or say why not."""
    parts: list[HeadsInput] = []
    for value in node.inputs[:3]:
        part = heads_input(value)
        if isinstance(part, str):
            return part
        parts.append(part)
    rotation = _common_rotation(*parts)
    if isinstance(rotation, str):
        return rotation
    packed = side_by_side([part.flat for part in parts])
    if packed is None:
        return "queries, keys and values are not the parts of one value, in this order"
    if packed.dtype not in (None, ir.DataType.FLOAT):
        return f"required float32, got {packed.dtype}"
    shapes = [static_dims(value) for value in node.inputs[:3] if value is not None]
    query, key, value_dims = (dims for dims in shapes if dims is not None)
    if key[3] != value_dims[3] or key[1] != value_dims[1]:
        return f"keys are {key[1]} x {key[3]}, values {value_dims[1]} x {value_dims[3]}"
    n_heads, head_dim, n_kv_heads = query[1], query[3], key[1]
    if n_heads is None or head_dim is None or n_kv_heads is None:
        return "the number of heads or their size is not fixed"
    inputs = [packed, rotation.cos, rotation.sin, *node.inputs[3:6], input_at(node, 6), input_at(node, 7)]
    while inputs[-1] is None:
        inputs.pop()
    attributes = {name: attr.value for name, attr in node.attributes.items()}
    attributes |= {"heads": n_heads, "kv_heads": n_kv_heads}
    fused = insert(node, "QkvAttention", inputs, attributes, domain=DSPARK, num_outputs=3)
    take_attention_outputs(node, fused, n_heads, head_dim)
    return ""


def _common_rotation(query: HeadsInput, key: HeadsInput, value: HeadsInput) -> Rotation | str:
    """The rotary embedding of queries and keys, or why there is no such one."""
    if value.rotation is not None:
        return "a rotary embedding turns the values"
    if query.rotation is None or key.rotation is None:
        return "no rotary embedding turns queries and keys"
    if query.rotation.cos is not key.rotation.cos or query.rotation.sin is not key.rotation.sin:
        return "queries and keys are turned by different cosines and sines"
    return query.rotation
