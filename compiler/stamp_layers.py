"""Copy the traced layers of a marked graph to every layer that is like them, with that layer's own weights.

See `stamp_markers` for the markers. Nodes of a traced layer that do not depend on the layer (constants, sizes)
are shared by its copies; weights are the copies' own tensors, without copying memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from onnx_ir.tensor_adapters import TorchTensor

from dsc.compiler.export_probe import Observation, distinct
from dsc.compiler.stamp_markers import DOMAIN


class StampingError(Exception):
    """The markers do not cut the graph into layers; every layer must be traced."""


def stamp_layers(model: ir.Model, observation: Observation, taps: Sequence[int] = ()) -> None:
    """Replace the markers of `model` by layers, in place.

    Raises:
        StampingError: a traced layer reads something of another layer that is not handed to it.
    """
    graph = model.graph
    markers = {(n.op_type, n.attributes["layer"].as_int()): n for n in graph if n.domain == DOMAIN}
    bodies = {layer: _Body(graph, observation, layer, markers) for layer in distinct(observation)}
    hidden: dict[int, ir.Value] = {}
    for layer, first in enumerate(observation.representatives):
        if layer != first:
            marker = markers["Layer", layer]
            hidden[layer] = bodies[first].stamp(layer, marker)
            marker.outputs[0].replace_all_uses_with(hidden[layer])
            graph.remove(marker, safe=True)
    for layer in distinct(observation):
        _unmark(graph, markers["Begin", layer])
        hidden[layer] = _only(markers["End", layer].inputs)
        _unmark(graph, markers["End", layer])
    for layer in taps:
        _tap(graph, hidden[layer], layer)
    model.opset_imports.pop(DOMAIN, None)


def _unmark(graph: ir.Graph, marker: ir.Node) -> None:
    for before, after in zip(_present(marker.inputs), marker.outputs, strict=True):
        after.replace_all_uses_with(before, replace_graph_outputs=True)
    graph.remove(marker, safe=True)


def _present(values: Sequence[ir.Value | None]) -> list[ir.Value]:
    return [value for value in values if value is not None]


def _only(values: Sequence[ir.Value | None]) -> ir.Value:
    (value,) = _present(values)
    return value


def _tap(graph: ir.Graph, value: ir.Value, layer: int) -> None:
    """Make `value` the output ``tap.{layer}``; an Identity keeps the value's own uses apart from the output."""
    node = ir.node("Identity", [value])
    node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = f"tap.{layer}", value.type, value.shape
    graph.append(node)
    graph.outputs.append(node.outputs[0])


class _Body:
    """The nodes between one traced layer's markers."""

    def __init__(
        self, graph: ir.Graph, observation: Observation, layer: int, markers: dict[tuple[str, int], ir.Node]
    ) -> None:
        self._graph = graph
        self._observation = observation
        self._layer = layer
        self._prefix = f"{observation.path}.{layer}."
        self._begin, self._end = markers["Begin", layer], markers["End", layer]
        self._nodes = self._own_nodes()

    def stamp(self, layer: int, marker: ir.Node) -> ir.Value:
        """Insert this body before `marker` as layer `layer`; returns its hidden state."""
        values: dict[ir.Value, ir.Value] = dict(zip(self._begin.outputs, _present(marker.inputs), strict=True))
        tensors = self._tensors(layer)
        for node in self._nodes:
            inputs = [None if value is None else self._input(value, layer, values, tensors) for value in node.inputs]
            copy = ir.Node(
                node.domain,
                node.op_type,
                inputs,
                list(node.attributes.values()),
                num_outputs=len(node.outputs),
                name=f"{node.name}_layer{layer}",
            )
            for old, new in zip(node.outputs, copy.outputs, strict=True):
                new.name, new.type, new.shape = f"{old.name}_layer{layer}", old.type, old.shape
                values[old] = new
                self._export_pool(old, new, layer)
            self._graph.insert_before(marker, copy)
        return values[_only(self._end.inputs)]

    def _own_nodes(self) -> list[ir.Node]:
        """What the layer's output needs and what depends on the layer, in graph order.

        Raises:
            StampingError: a value of another layer is reached, or a node holds a subgraph.
        """
        needed: set[ir.Node] = set()
        pending = [_only(self._end.inputs).producer()]
        while pending:
            node = pending.pop()
            if node is None or node in needed or node is self._begin:
                continue
            if node.domain == DOMAIN:
                raise StampingError(f"layer {self._layer} reads {node.op_type} of another layer")
            if any(a.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for a in node.attributes.values()):
                raise StampingError(f"layer {self._layer} holds control flow ({node.op_type})")
            needed.add(node)
            pending += [value.producer() for value in node.inputs if value is not None]
        own: set[ir.Value] = set(self._begin.outputs)
        nodes = []
        for node in self._graph:
            if node in needed and any(value in own or self._is_own(value) for value in node.inputs):
                nodes.append(node)
                own.update(node.outputs)
        return nodes

    def _is_own(self, value: ir.Value | None) -> bool:
        """Whether a graph input or initializer belongs to this layer alone."""
        if value is None or value.name is None or value.producer() is not None:
            return False
        return value.name.startswith(self._prefix) or value.name in self._pool_names()

    def _pool_names(self) -> tuple[str, str]:
        return f"k_pool.{self._layer}", f"v_pool.{self._layer}"

    def _tensors(self, layer: int) -> dict[str, Any]:
        module = self._observation.layers[layer].module
        return dict(module.named_parameters()) | dict(module.named_buffers())

    def _input(
        self, value: ir.Value, layer: int, values: dict[ir.Value, ir.Value], tensors: dict[str, Any]
    ) -> ir.Value:
        if value in values:
            return values[value]
        if not self._is_own(value):
            return value
        name = str(value.name)
        if name.startswith(self._prefix):
            short = name[len(self._prefix) :]
            values[value] = _initializer(self._graph, f"{self._observation.path}.{layer}.{short}", tensors[short])
        else:
            values[value] = ir.Value(name=f"{name[:6]}.{layer}", type=value.type, shape=value.shape)
            self._graph.inputs.append(values[value])
        return values[value]

    def _export_pool(self, old: ir.Value, new: ir.Value, layer: int) -> None:
        """A copy of a value that is a pool output becomes the copy's pool output."""
        if old.is_graph_output():
            new.name = f"{str(old.name)[:10]}.{layer}"
            self._graph.outputs.append(new)


def _initializer(graph: ir.Graph, name: str, tensor: Any) -> ir.Value:
    present = graph.initializers.get(name)
    if present is not None:
        return present
    content = TorchTensor(tensor.detach(), name=name)
    value = ir.Value(name=name, type=ir.TensorType(content.dtype), shape=ir.Shape(content.shape), const_value=content)
    graph.register_initializer(value)
    return value
