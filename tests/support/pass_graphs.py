"""Tiny graphs for pass tests, written as ONNX text, and running them in onnxruntime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime

HEADER = '<ir_version: 10, opset_import: ["": 23, "com.microsoft": 1, "ai.dspark": 1]>'
BATCHES_AND_LENGTHS = [(1, 1), (1, 4), (2, 1), (2, 4), (3, 1), (3, 4)]


def text_model(text: str, **weights) -> ir.Model:
    """A model from ``agraph (inputs) => (outputs) { nodes }``; inputs in `weights` become initializers."""
    model = ir.from_onnx_text(f"{HEADER} {text}")
    graph = model.graph
    for name, array in weights.items():
        value = next(v for v in graph.inputs if v.name == name)
        graph.inputs.remove(value)
        value.const_value = array if isinstance(array, ir.TensorProtocol) else ir.tensor(array, name=value.name)
        graph.register_initializer(value)
    return model


def ops(model: ir.Model) -> list[str]:
    """Operator names in graph order."""
    return [node.op_type for node in model.graph]


def session(model: ir.Model, optimise: bool = True, library: Path | None = None) -> onnxruntime.InferenceSession:
    """The model written and loaded again by onnxruntime, with the native kernels of `library` when it is given."""
    options = onnxruntime.SessionOptions()
    if library is not None:
        options.register_custom_ops_library(str(library))
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if not optimise:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def run(model: ir.Model, feeds: dict, optimise: bool = True, library: Path | None = None) -> dict[str, np.ndarray]:
    """Outputs by name."""
    opened = session(model, optimise, library)
    names = [output.name for output in opened.get_outputs()]
    return dict(zip(names, opened.run(names, feeds), strict=True))


def assert_same_results(before: ir.Model, after: ir.Model, make_feeds, rtol=1e-5, atol=1e-6, library=None) -> None:
    """Both models agree for batches 1, 2, 3 and 1 or 4 positions; `make_feeds(batch, seq, rng)`."""
    one, other = session(before), session(after, library=library)
    names = [output.name for output in one.get_outputs()]
    assert names == [output.name for output in other.get_outputs()]
    rng = np.random.default_rng(0)
    for batch, seq in BATCHES_AND_LENGTHS:
        feeds = make_feeds(batch, seq, rng)
        results = zip(names, one.run(names, feeds), other.run(names, feeds), strict=True)
        for name, expected, got in results:
            np.testing.assert_allclose(
                got, expected, rtol=rtol, atol=atol, err_msg=f"{name} at batch {batch}, seq {seq}"
            )
