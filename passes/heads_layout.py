"""Undo the head-splitting around attention: [B, H, S, D] seen as the flat [B, S, H*D] it came from."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from dsc.passes.graph_edit import (
    add_initializer,
    attribute,
    input_at,
    insert,
    is_op,
    owner,
    producer,
    remove_dead,
    replace_value,
    static_dims,
)

_HEADS_TO_FRONT = (0, 2, 1, 3)


def flat_heads(value: ir.Value, anchor: ir.Node, n_heads: int, head_dim: int) -> ir.Value:
    """`value` [B, H, S, D] as [B, S, H*D], computed before `anchor` with as little data movement as possible.

    A RotaryEmbedding works on the flat form too; an RMSNormalization over D before or after a transpose.
    """
    step = producer(value)
    if step is not None and is_op(step, "RotaryEmbedding"):
        inner = flat_heads(_first(step), anchor, n_heads, head_dim)
        attributes = {name: attr.value for name, attr in step.attributes.items()} | {"num_heads": n_heads}
        rotated = insert(
            anchor,
            "RotaryEmbedding",
            [inner, *step.inputs[1:]],
            attributes,
            dtype=value.dtype,
            shape=_flat_shape(value, n_heads * head_dim),
        )
        return rotated.outputs[0]
    split = heads_last(value, anchor)
    before = producer(split)
    if before is not None and is_op(before, "Reshape"):
        flat = _first(before)
        dims = static_dims(flat)
        if dims is not None and len(dims) == 3 and dims[2] == n_heads * head_dim:
            return flat
    shape = add_initializer(owner(anchor), f"flat_heads_{n_heads * head_dim}", np.array([0, 0, n_heads * head_dim]))
    merged = insert(anchor, "Reshape", [split, shape], dtype=value.dtype, shape=_flat_shape(value, n_heads * head_dim))
    return merged.outputs[0]


def heads_last(value: ir.Value, anchor: ir.Node) -> ir.Value:
    """`value` [B, H, S, D] as [B, S, H, D]: the input of its transpose, or a new transpose."""
    step = producer(value)
    if step is not None and is_heads_transpose(step):
        return _first(step)
    shape = _swapped_shape(value)
    if step is not None and _normalises_head(step):
        inner = heads_last(_first(step), anchor)
        attributes = {name: attr.value for name, attr in step.attributes.items()} | {"axis": -1}
        again = insert(anchor, "RMSNormalization", [inner, step.inputs[1]], attributes, dtype=value.dtype, shape=shape)
        return again.outputs[0]
    swapped = insert(anchor, "Transpose", [value], {"perm": _HEADS_TO_FRONT}, dtype=value.dtype, shape=shape)
    return swapped.outputs[0]


def use_flat_output(old: ir.Value, flat: ir.Value, n_heads: int, head_dim: int) -> None:
    """Let the users of `old` [B, H, S, D] read `flat` [B, S, H*D]; what only flattened it goes."""
    width = n_heads * head_dim
    for user in [node for node, _ in old.uses()]:
        if is_heads_transpose(user):
            for reshape in [node for node, _ in user.outputs[0].uses()]:
                if is_op(reshape, "Reshape") and _is_flat(reshape.outputs[0], width):
                    replace_value(reshape.outputs[0], flat)
                    remove_dead([reshape])
    source = flat.producer()
    if source is None or not (old.uses() or old.is_graph_output()):
        return
    graph = owner(source)
    shape = add_initializer(graph, f"split_heads_{n_heads}_{head_dim}", np.array([0, 0, n_heads, head_dim]))
    split = ir.node("Reshape", [flat, shape])
    front = ir.node("Transpose", split.outputs, {"perm": _HEADS_TO_FRONT})
    graph.insert_after(source, [split, front])
    split.outputs[0].type = flat.type
    replace_value(old, front.outputs[0])


def take_attention_outputs(node: ir.Node, new: ir.Node, n_heads: int, head_dim: int) -> None:
    """Give the outputs of an attention node to another with a flat first output, and remove what nobody reads now."""
    output, old = new.outputs[0], node.outputs[0]
    output.type = old.type
    symbols = _symbols(old)
    if symbols:
        output.shape = ir.Shape([symbols[0], symbols[2], n_heads * head_dim])
    use_flat_output(old, output, n_heads, head_dim)
    for before, after in zip(node.outputs[1:], new.outputs[1:], strict=True):
        after.type, after.shape = before.type, before.shape
        name, before.name = before.name, f"{before.name}_replaced"
        before.replace_all_uses_with(after, replace_graph_outputs=True)
        after.name = name
    remove_dead([node])


def is_heads_transpose(node: ir.Node) -> bool:
    """Whether `node` swaps the axes of heads and positions."""
    perm = node.attributes.get("perm")
    return is_op(node, "Transpose") and perm is not None and tuple(perm.value) == _HEADS_TO_FRONT


def _normalises_head(node: ir.Node) -> bool:
    return is_op(node, "RMSNormalization") and attribute(node, "axis", -1) in (-1, 3)


def _is_flat(value: ir.Value, width: int) -> bool:
    dims = static_dims(value)
    return dims is not None and len(dims) == 3 and dims[2] == width


def _first(node: ir.Node) -> ir.Value:
    value = input_at(node, 0)
    if value is None:
        raise ValueError(f"node {node.name!r} has no first input")
    return value


def _flat_shape(value: ir.Value, width: int) -> list[int | str | None] | None:
    dims = _symbols(value)
    return None if dims is None else [dims[0], dims[2], width]


def _swapped_shape(value: ir.Value) -> list[int | str | None] | None:
    dims = _symbols(value)
    return None if dims is None else [dims[0], dims[2], dims[1], dims[3]]


def _symbols(value: ir.Value) -> list[int | str | None] | None:
    if value.shape is None:
        return None
    return [dim if isinstance(dim, int) else dim.value for dim in value.shape]
