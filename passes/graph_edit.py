"""Small questions to a graph and small changes of it that several passes share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

MICROSOFT = "com.microsoft"
DSPARK = "ai.dspark"

_T = TypeVar("_T", int, float, str)


def attribute(node: ir.Node, name: str, default: _T) -> _T:
    """The value of an attribute of `node`, `default` when it is absent."""
    found = node.attributes.get(name)
    return default if found is None else type(default)(found.value)


def is_op(node: ir.Node | None, op_type: str, domain: str = "") -> bool:
    """Whether `node` is this operator of this domain."""
    return node is not None and node.op_type == op_type and node.domain == domain


def producer(value: ir.Value | None) -> ir.Node | None:
    """The node that computes `value`; None for a graph input, an initializer or an absent value."""
    return None if value is None else value.producer()


def input_at(node: ir.Node, index: int) -> ir.Value | None:
    """Input `index` of `node`, None when it is absent."""
    return node.inputs[index] if index < len(node.inputs) else None


def constant_array(value: ir.Value | None, max_elements: int = 4096) -> npt.NDArray[Any] | None:
    """The content of a small constant, None when `value` is not one."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return None if tensor is None or tensor.size > max_elements else tensor.numpy()


def is_weight(value: ir.Value | None) -> bool:
    """Whether `value` is an initializer that no caller can replace."""
    return value is not None and value.is_initializer() and not value.is_graph_input() and value.const_value is not None


def static_dims(value: ir.Value) -> tuple[int | None, ...] | None:
    """The shape with None for every symbolic axis; None when even the rank is unknown."""
    if value.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else None for dim in value.shape)


def tensor_dims(tensor: ir.TensorProtocol) -> tuple[int, ...]:
    """The shape of a tensor that has content."""
    return tuple(int(str(dim)) for dim in tensor.shape)


def fresh_name(graph: ir.Graph, hint: str) -> str:
    """A value name that the graph does not have yet: `hint`, or `hint` and a number."""
    taken = {value.name for value in [*graph.inputs, *graph.initializers.values()]}
    taken |= {output.name for node in graph for output in node.outputs}
    name, number = hint, 1
    while name in taken:
        name, number = f"{hint}_{number}", number + 1
    return name


def add_initializer(graph: ir.Graph, name: str, content: ir.TensorProtocol | npt.NDArray[Any]) -> ir.Value:
    """Register `content` as an initializer under `name` or the nearest free name.

    An initializer of that name with equal content is used again when it is small.
    """
    tensor = ir.tensor(np.asarray(content, order="C")) if isinstance(content, np.ndarray) else content
    present = graph.initializers.get(name)
    if present is not None and _equal_small(present.const_value, tensor):
        return present
    value = ir.Value(
        name=fresh_name(graph, name), shape=ir.Shape(tensor_dims(tensor)), type=ir.TensorType(tensor.dtype)
    )
    value.const_value = tensor
    graph.register_initializer(value)
    return value


def rearranged(
    tensor: ir.TensorProtocol,
    change: Callable[[npt.NDArray[Any]], npt.NDArray[Any]],
    shape: Sequence[int],
    dtype: ir.DataType | None = None,
) -> ir.TensorProtocol:
    """`change` of a tensor's content, of the same type or of `dtype`, made when it is read: no copy is kept."""
    kind = dtype or tensor.dtype

    def content() -> ir.TensorProtocol:
        return ir.Tensor(np.ascontiguousarray(change(tensor.numpy())), dtype=kind)

    return ir.LazyTensor(content, dtype=kind, shape=ir.Shape(shape))


def _equal_small(one: ir.TensorProtocol | None, other: ir.TensorProtocol, max_elements: int = 64) -> bool:
    if one is None or one.dtype != other.dtype or one.shape != other.shape or one.size > max_elements:
        return False
    return one.tobytes() == other.tobytes()


def insert(
    anchor: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: dict[str, Any] | None = None,
    *,
    domain: str = "",
    dtype: ir.DataType | None = None,
    shape: Sequence[int | str | None] | ir.Shape | None = None,
    like: ir.Value | None = None,
    num_outputs: int = 1,
) -> ir.Node:
    """A new node right before `anchor`; its first output has `dtype` and `shape`, or those of `like`."""
    node = ir.node(op_type, inputs, attributes or {}, domain=domain, num_outputs=num_outputs)
    if like is not None:
        dtype, shape = dtype or like.dtype, shape or like.shape
    if dtype is not None:
        node.outputs[0].type = ir.TensorType(dtype)
    if shape is not None:
        node.outputs[0].shape = shape if isinstance(shape, ir.Shape) else ir.Shape(shape)
    owner(anchor).insert_before(anchor, node)
    return node


def owner(node: ir.Node) -> ir.Graph:
    """The graph that `node` is part of."""
    graph = node.graph
    if not isinstance(graph, ir.Graph):
        raise TypeError(f"node {node.name!r} is not part of a graph")
    return graph


def replace_value(old: ir.Value, new: ir.Value) -> None:
    """Let every user of `old`, graph outputs included, read `new`; an output keeps its name and shape."""
    if old.is_graph_output():
        name = old.name
        old.name = None if old.producer() is None else f"{name}_replaced"
        new.name, new.type = name, old.type
        new.shape = old.shape
    else:
        new.type = new.type or old.type
        new.shape = new.shape or old.shape
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def remove_dead(nodes: Sequence[ir.Node]) -> None:
    """Remove those of `nodes`, last first, whose outputs nobody uses, and what only fed them."""
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node.graph is None or any(out.uses() or out.is_graph_output() for out in node.outputs):
            continue
        feeders = [feeder for feeder in map(producer, node.inputs) if feeder is not None]
        owner(node).remove(node, safe=True)
        pending.extend(feeders)


def import_domain(model: ir.Model, domain: str) -> None:
    """Declare version 1 of `domain` when the model does not declare it yet."""
    model.graph.opset_imports.setdefault(domain, 1)


def drop_unused_initializers(graph: ir.Graph) -> int:
    """Forget initializers that no node reads; returns how many."""
    unused = [v for v in graph.initializers.values() if not v.uses() and not v.is_graph_output()]
    for value in unused:
        graph.initializers.pop(str(value.name))
    return len(unused)
