"""Shapes put together from sizes of the reshaped value itself, as constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from dsc.passes.base import GraphPass, PassResult, Reason
from dsc.passes.graph_edit import add_initializer, attribute, constant_array, input_at, is_op, producer, remove_dead


@dataclass(frozen=True)
class ConstantShapesPass(GraphPass):
    """State the shape of a Reshape as a constant where its symbolic sizes are the input's own.

    ::

        b = Shape(ids)[0:1]; s = Shape(ids)[1:2]; y = Reshape(x[batch, seq, 64], Concat(b, s, [-1], [16]))
        ->
        y = Reshape(x[batch, seq, 64], [0, 0, -1, 16])

    onnxruntime's CUDA provider leaves what puts a shape together to the CPU.

    Rules:
        1. A size that is read from an axis of the same name as the input's axis in that place becomes 0, which
           Reshape takes from its input. Other sizes must be constants.
        2. `allowzero`, for which 0 is a size, goes; a Reshape that states a size of 0 stays.
    """

    name: ClassVar[str] = "constant-shapes"

    def call(self, model: ir.Model) -> PassResult:
        """Replace every shape that rule 1 covers."""
        fired = 0
        skipped: list[Reason] = []
        for node in tuple(model.graph):
            joined = producer(input_at(node, 1)) if is_op(node, "Reshape") else None
            if joined is None or not is_op(joined, "Concat"):
                continue
            sizes = _constant_sizes(node, joined)
            if isinstance(sizes, Reason):
                skipped.append(sizes)
                continue
            node.attributes.pop("allowzero", None)
            name = "_".join(["shape", *("rest" if size < 0 else str(size) for size in sizes)])
            node.replace_input_with(1, add_initializer(model.graph, name, np.array(sizes, np.int64)))
            remove_dead([joined])
            fired += 1
        return PassResult(fired, tuple(skipped))


def _constant_sizes(node: ir.Node, joined: ir.Node) -> list[int] | Reason:
    """The sizes that `joined` gives, or the rule that forbids to state them."""
    sizes: list[int] = []
    for part in joined.inputs:
        known = constant_array(part)
        if known is not None:
            stated = [int(size) for size in known.reshape(-1)]
            if 0 in stated and attribute(node, "allowzero", 0):
                return Reason("2", str(node.name), "a size of 0 is stated")
            sizes += stated
        elif _is_axis_of(part, node.inputs[0], len(sizes)):
            sizes.append(0)
        else:
            return Reason("1", str(node.name), f"size {len(sizes)} is not that of axis {len(sizes)} of the input")
    return sizes


def _is_axis_of(size: ir.Value | None, value: ir.Value | None, axis: int) -> bool:
    """Whether `size` is read from an axis with the name of this axis of `value`."""
    read = producer(size)
    if read is None or not is_op(read, "Shape"):
        return False
    start, end = attribute(read, "start", 0), attribute(read, "end", -1)
    name = _axis_name(value, axis)
    return name is not None and end == start + 1 and _axis_name(read.inputs[0], start) == name


def _axis_name(value: ir.Value | None, axis: int) -> str | None:
    if value is None or value.shape is None or not 0 <= axis < len(value.shape):
        return None
    dim = value.shape[axis]
    return None if isinstance(dim, int) else dim.value
