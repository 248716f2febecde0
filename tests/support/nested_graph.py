"""A graph with a tensor in every kind of place: among its initializers, in both branches of an If, in a function."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

N = 37
ARRAYS = {
    name: np.random.default_rng(index).normal(size=N).astype(np.float32)
    for index, name in enumerate(("outer", "then", "else", "inner"))
}


def nested_model() -> onnx.ModelProto:
    """y = x * outer + (x + then if flag else x + else) + (x - inner), the last by a function with a constant."""
    constant = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(ARRAYS["inner"], "inner"))
    difference = helper.make_node("Sub", ["a", "c"], ["b"])
    opset = helper.make_opsetid("", 21)
    function = helper.make_function("local", "Less", ["a"], ["b"], [constant, difference], [opset])
    nodes = [
        helper.make_node("Mul", ["x", "outer"], ["product"]),
        helper.make_node("If", ["flag"], ["chosen"], then_branch=_branch("then"), else_branch=_branch("else")),
        helper.make_node("Less", ["x"], ["less"], domain="local"),
        helper.make_node("Sum", ["product", "chosen", "less"], ["y"]),
    ]
    inputs = [_value("x"), helper.make_tensor_value_info("flag", TensorProto.BOOL, [])]
    outer = numpy_helper.from_array(ARRAYS["outer"], "outer")
    graph = helper.make_graph(nodes, "nested", inputs, [_value("y")], [outer])
    opsets = [opset, helper.make_opsetid("local", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=[function], ir_version=10)


def result(x: np.ndarray, flag: bool) -> np.ndarray:
    """y by NumPy."""
    return x * ARRAYS["outer"] + x + ARRAYS["then" if flag else "else"] + x - ARRAYS["inner"]


def tensors(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """Every tensor of `nested_model` by name, as it lies in the protobuf."""
    branches = [attribute.g for attribute in model.graph.node[1].attribute]
    initializers = [*model.graph.initializer, *(tensor for graph in branches for tensor in graph.initializer)]
    constants = [node.attribute[0].t for node in model.functions[0].node if node.op_type == "Constant"]
    return {tensor.name: tensor for tensor in (*initializers, *constants)}


def _branch(name: str) -> onnx.GraphProto:
    node = helper.make_node("Add", ["x", name], [f"{name}.sum"])
    return helper.make_graph([node], name, [], [_value(f"{name}.sum")], [numpy_helper.from_array(ARRAYS[name], name)])


def _value(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [N])
