"""A stored graph follows its bundle's name, and names nothing else."""

import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from dsc.bundle_schema.bundle_errors import ForeignLocation
from dsc.bundle_schema.container import STORED_LOCATION, relocate_graph

WEIGHT = np.arange(64, dtype=np.float32).reshape(8, 8)
OFFSET = 4096


def graph_with(location: str) -> bytes:
    """``y = x @ w`` whose weight lies at `OFFSET` of the file called `location`."""
    weight = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, WEIGHT.shape, WEIGHT.tobytes(), raw=True)
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(OFFSET)), ("length", str(WEIGHT.nbytes))):
        weight.external_data.add(key=key, value=value)
    value_info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [value_info("x", onnx.TensorProto.FLOAT, [1, 8])],
        [value_info("y", onnx.TensorProto.FLOAT, [1, 8])],
        [weight],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    return model.SerializeToString()


@pytest.mark.parametrize("name", ["a", "renamed.dsmodel", "with space.bin", "modèle.dsmodel", "n" * 250])
def test_a_renamed_bundle_still_finds_its_weights(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(bytes(OFFSET) + WEIGHT.tobytes())
    graph = relocate_graph(graph_with(STORED_LOCATION), name, "target/graph.onnx")
    parsed = onnx.load_model_from_string(graph)
    (location,) = [entry.value for entry in parsed.graph.initializer[0].external_data if entry.key == "location"]
    assert os.path.normpath(location) == name
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(tmp_path))
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    x = np.ones((1, 8), np.float32)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], x @ WEIGHT)


@pytest.mark.parametrize("location", ["/etc/passwd", "../other.bin", "weights.bin", "./" * 127 + "xy", ""])
def test_a_graph_that_names_another_file_is_refused(location: str):
    with pytest.raises(ForeignLocation, match=r"target/graph\.onnx: weights must lie in the bundle itself, got 1"):
        relocate_graph(graph_with(location), "a.dsmodel", "target/graph.onnx")


def test_a_graph_without_external_data_stays_as_it_is():
    model = onnx.load_model_from_string(graph_with("x"))
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(WEIGHT, "location"))
    graph = model.SerializeToString()
    assert relocate_graph(graph, "a.dsmodel", "target/graph.onnx") == graph
