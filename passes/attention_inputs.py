"""What feeds an attention node: projections, behind the splitting into heads and the rotary embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from dsc.passes.graph_edit import attribute, constant_array, is_op, producer, static_dims
from dsc.passes.heads_layout import is_heads_transpose


@dataclass(frozen=True)
class Rotation:
    """A rotary embedding of the first 2 R elements of each head, element i turned with element i + R.

    Attributes:
        cos, sin: [B, S, R].
    """

    cos: ir.Value
    sin: ir.Value


@dataclass(frozen=True)
class HeadsInput:
    """Queries, keys or values [B, H, S, D] as they come out of the projection.

    Attributes:
        flat: [B, S, H*D].
        rotation: None when nothing turns them.
    """

    flat: ir.Value
    rotation: Rotation | None


def heads_input(value: ir.Value | None) -> HeadsInput | str:
    """The projection behind `value` [B, H, S, D], or why it is not simply a projection split into heads."""
    split, rotation = _below_rotation(value)
    transpose = producer(split)
    if transpose is None or not is_heads_transpose(transpose):
        return f"{_described(transpose)} stands between projection and attention"
    reshape = producer(transpose.inputs[0])
    flat = reshape.inputs[0] if reshape is not None and is_op(reshape, "Reshape") else None
    if flat is None:
        return f"{_described(reshape)} stands between projection and attention"
    dims, heads = static_dims(flat), static_dims(split) if split is not None else None
    if dims is None or heads is None or len(dims) != 3 or len(heads) != 4:
        return "the shapes of projection and heads are not known"
    if heads[1] is None or heads[3] is None or dims[2] != heads[1] * heads[3]:
        return f"the projection is {dims[2]} wide, its heads {heads[1]} x {heads[3]}"
    return HeadsInput(flat, rotation)


def side_by_side(parts: Sequence[ir.Value | None]) -> ir.Value | None:
    """The value [B, S, W] that `parts` [B, S, ...] are cut from, one after another and whole; None otherwise."""
    steps = [producer(part) for part in parts]
    first = steps[0]
    if first is None or any(step is None or step.inputs[0] is not first.inputs[0] for step in steps):
        return None
    whole = first.inputs[0]
    if whole is None or whole.shape is None or len(whole.shape) != 3:
        return None
    if is_op(first, "Split"):
        in_order = tuple(first.outputs) == tuple(parts) and attribute(first, "axis", 0) in (-1, 2)
        return whole if in_order else None
    ends = [_cut(part, axis=2) for part in parts]
    start = 0
    for end, part in zip(ends, parts, strict=True):
        width = static_dims(part)[2] if part is not None and static_dims(part) else None  # type: ignore[index]
        if end is None or width is None or end != (start, start + width):
            return None
        start += width
    return whole if whole.shape[2] == start else None


def _below_rotation(value: ir.Value | None) -> tuple[ir.Value | None, Rotation | None]:
    """The heads before their rotary embedding, which may turn only their first elements."""
    step = producer(value)
    if step is None or not is_op(step, "Concat"):
        return _turned(value)
    if len(step.inputs) != 2 or attribute(step, "axis", 0) not in (-1, 3):
        return value, None
    low, rotation = _turned(step.inputs[0])
    cut_low, cut_high = producer(low), producer(step.inputs[1])
    source = cut_low.inputs[0] if cut_low is not None else None
    if rotation is None or source is None or cut_high is None or cut_high.inputs[0] is not source:
        return value, None
    dims, turned = static_dims(source), _cut(low, axis=3)
    if dims is None or len(dims) != 4 or turned is None or turned[0] != 0:
        return value, None
    return (source, rotation) if _cut(step.inputs[1], axis=3) == (turned[1], dims[3]) else (value, None)


def _turned(value: ir.Value | None) -> tuple[ir.Value | None, Rotation | None]:
    """What a whole RotaryEmbedding of the "rotate half" form turns; `value` itself when it is none."""
    step = producer(value)
    if step is None or not is_op(step, "RotaryEmbedding") or len(step.inputs) != 3:
        return value, None
    cos, sin = step.inputs[1:]
    interleaved, part = attribute(step, "interleaved", 0), attribute(step, "rotary_embedding_dim", 0)
    if interleaved or part or cos is None or sin is None:
        return value, None
    return step.inputs[0], Rotation(cos, sin)


def _cut(value: ir.Value | None, axis: int) -> tuple[int, int] | None:
    """Start and end of the one slice along `axis` that `value` is."""
    step = producer(value)
    if step is None or value is None or not is_op(step, "Slice") or len(step.inputs) < 4 or step.inputs[0] is None:
        return None
    size = (static_dims(step.inputs[0]) or (None,) * (axis + 1))[axis]
    parts = [constant_array(operand) for operand in step.inputs[1:]]
    if size is None or any(part is None or part.size != 1 for part in parts):
        return None
    start, end, on, *steps = (int(part.reshape(-1)[0]) for part in parts if part is not None)
    if on not in (axis, axis - len(step.inputs[0].shape or ())) or steps not in ([], [1]) or min(start, end) < 0:
        return None
    return start, min(end, size)


def _described(step: ir.Node | None) -> str:
    return "something else than a node" if step is None else f"{step.op_type}"
