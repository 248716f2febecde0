"""Is this graph whole? The check that runs after every pass."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir
from onnx.checker import ValidationError
from onnx.shape_inference import InferenceError
from onnx_ir.passes.common import CheckerPass

from dsc.bundle_schema.errors import PassError


def verify_graph(model: ir.Model) -> None:
    """Check names, order, dangling values, initializers, opsets, then types and shapes by inference.

    Operators that ONNX does not know (ai.dspark, com.microsoft) are checked for structure only.

    Raises:
        PassError: the first thing found wrong, with the node or value it concerns.
    """
    for graph in model.graphs():
        _check_structure(graph)
    _check_interface(model.graph)
    _check_opsets(model)
    _check_types(model)


def _check_structure(graph: ir.Graph) -> None:
    """Every value has one name and one definition, and is defined before it is used."""
    names: set[str] = set()
    for value in graph.initializers.values():
        _check_initializer(value)
    defined = {id(value): value for value in [*graph.inputs, *graph.initializers.values()]}
    for value in defined.values():
        _claim_name(value, names)
    for node in graph:
        _check_inputs(node, graph, defined)
        for output in node.outputs:
            _claim_name(output, names)
            defined[id(output)] = output
    for output in graph.outputs:
        if id(output) not in defined:
            raise PassError(f"output {output.name!r}", "nothing in the graph defines it")


def _check_inputs(node: ir.Node, graph: ir.Graph, defined: dict[int, ir.Value]) -> None:
    for value in _captured_values(node):
        # A value of an enclosing or enclosed graph is checked with that graph.
        if value.graph in (None, graph) and id(value) not in defined:
            raise PassError(_label(node), f"uses {value.name!r} before anything defines it")


def _captured_values(node: ir.Node) -> Iterable[ir.Value]:
    yield from (value for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        if attribute.type is ir.AttributeType.GRAPH:
            for inner in attribute.as_graph():
                yield from _captured_values(inner)


def _claim_name(value: ir.Value, names: set[str]) -> None:
    if value.name is None:
        raise PassError("graph", "a value has no name")
    if value.name == "":
        return  # an output that nobody asked for
    if value.name in names:
        raise PassError(f"value {value.name!r}", "two values have this name")
    names.add(value.name)


def _check_initializer(value: ir.Value) -> None:
    tensor = value.const_value
    where = f"initializer {value.name!r}"
    if tensor is None:
        raise PassError(where, "has no content")
    if value.dtype is not None and value.dtype != tensor.dtype:
        raise PassError(where, f"is declared {value.dtype} but holds {tensor.dtype}")
    if value.shape is not None and tuple(value.shape) != tuple(tensor.shape):
        raise PassError(where, f"is declared {value.shape} but holds {tensor.shape}")


def _check_interface(graph: ir.Graph) -> None:
    """What the outside sees is fully typed; otherwise no session can be bound to it."""
    for kind, values in (("input", graph.inputs), ("output", graph.outputs)):
        for value in values:
            if value.dtype is None or value.shape is None:
                raise PassError(f"{kind} {value.name!r}", "has no element type or no shape")


def _check_opsets(model: ir.Model) -> None:
    for node in model.graph.all_nodes():
        if node.domain not in model.opset_imports:
            raise PassError(_label(node), f"domain {node.domain!r} has no opset import")


def _check_types(model: ir.Model) -> None:
    try:
        # The checker works on a copy of the graph without its weights, so this costs no memory of their size.
        CheckerPass(full_check=True)(model)
    except (ValidationError, InferenceError) as error:
        raise PassError("graph", f"onnx's checker refuses it: {str(error).strip()}") from error


def _label(node: ir.Node) -> str:
    return f"node {node.name!r} ({node.domain or 'onnx'}::{node.op_type})"
