"""Run one `ai.dspark` node through onnxruntime by its function body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort


def operator_model(
    name: str,
    inputs: Mapping[str, np.ndarray],
    input_names: Sequence[str],
    output_names: Sequence[str],
    attributes: Mapping[str, Any],
    function: ir.Function | None,
) -> bytes:
    """A model of one node; an input that is not in `inputs` is left out."""
    values = {
        key: ir.Value(
            name=key,
            type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
            shape=ir.Shape([f"{key}{axis}" for axis in range(array.ndim)]),
        )
        for key, array in inputs.items()
    }
    given: list[ir.Value | None] = [values.get(key) for key in input_names]
    while given and given[-1] is None:
        given.pop()
    node = ir.node(name, given, attributes=dict(attributes), domain="ai.dspark", num_outputs=len(output_names))
    for output, key in zip(node.outputs, output_names, strict=True):
        output.name = key
    graph = ir.Graph(
        [values[key] for key in input_names if key in values],
        list(node.outputs),
        nodes=[node],
        name="one_operator",
        opset_imports={"": 23, "ai.dspark": 1, "com.microsoft": 1},
    )
    model = ir.Model(graph, ir_version=10, functions=[function] if function is not None else [])
    return ir.to_proto(model).SerializeToString()


def run_operator(
    name: str,
    inputs: Mapping[str, np.ndarray],
    input_names: Sequence[str],
    output_names: Sequence[str],
    attributes: Mapping[str, Any],
    function: ir.Function | None,
) -> dict[str, np.ndarray]:
    """The node's outputs by name."""
    data = operator_model(name, inputs, input_names, output_names, attributes, function)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    given = {value.name for value in session.get_inputs()}
    found = session.run(list(output_names), {key: value for key, value in inputs.items() if key in given})
    return dict(zip(output_names, found, strict=True))
