"""A stored graph follows its bundle's name, and names nothing else, wherever and however it is written."""

import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from nested_graph import ARRAYS, nested_model, tensors

from dsc.bundle_schema.bundle_errors import ForeignLocation
from dsc.bundle_schema.container import STORED_LOCATION, relocate_graph
from dsc.bundle_schema.graph_location import LEADS_TO

MEMBER = "target/graph.onnx"
WEIGHT = np.arange(64, dtype=np.float32).reshape(8, 8)
OFFSET = 4096
MEMORY = "*/_ORT_MEM_ADDR_/*"  # onnxruntime's own name of its process's memory
FOREIGN = ["/etc/passwd", "../other.bin", "weights.bin", "./" * 127 + "xy", "", MEMORY]


def name_file(tensor: onnx.TensorProto, location: str) -> None:
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(OFFSET)), ("length", str(WEIGHT.nbytes))):
        tensor.external_data.add(key=key, value=value)


def graph_with(location: str) -> bytes:
    """``y = x @ w`` whose weight lies at `OFFSET` of the file called `location`."""
    weight = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, WEIGHT.shape, WEIGHT.tobytes(), raw=True)
    name_file(weight, location)
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


def location_in(graph: bytes) -> str:
    """What a reader of protobuf finds."""
    (weight,) = onnx.load_model_from_string(graph).graph.initializer
    return [entry.value for entry in weight.external_data if entry.key == "location"][-1]


@pytest.mark.parametrize("name", ["a", "renamed.dsmodel", "with space.bin", "modèle.dsmodel", "n" * 250])
def test_a_renamed_bundle_still_finds_its_weights(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(bytes(OFFSET) + WEIGHT.tobytes())
    graph = relocate_graph(graph_with(STORED_LOCATION), name, MEMBER)
    assert os.path.normpath(location_in(graph)) == name
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(tmp_path))
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    x = np.ones((1, 8), np.float32)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], x @ WEIGHT)


@pytest.mark.parametrize("location", FOREIGN)
def test_a_graph_that_names_another_file_is_refused(location: str):
    with pytest.raises(ForeignLocation, match=r"target/graph\.onnx: tensor 'w': its data must lie in the bundle"):
        relocate_graph(graph_with(location), "a.dsmodel", MEMBER)


@pytest.mark.parametrize("name", ARRAYS)
def test_a_tensor_in_a_branch_or_a_function_is_found_and_named(name: str):
    model = nested_model()
    for other, tensor in tensors(model).items():
        name_file(tensor, STORED_LOCATION if other != name else "../other.bin")
    with pytest.raises(ForeignLocation, match=f"tensor '{name}'"):
        relocate_graph(model.SerializeToString(), "a.dsmodel", MEMBER)
    for entry in tensors(model)[name].external_data:
        entry.value = STORED_LOCATION if entry.key == "location" else entry.value
    relocated = onnx.load_model_from_string(relocate_graph(model.SerializeToString(), "a.dsmodel", MEMBER))
    for tensor in tensors(relocated).values():
        assert os.path.normpath(tensor.external_data[0].value) == "a.dsmodel"


SECRET = "../other.bin"
KEY, OTHER = b"\x0a\x08location", b"\x12\x0c" + SECRET.encode()
BUNDLE = b"\x12\x80\x02" + STORED_LOCATION.encode()
SPELLINGS = {
    "long size": b"\x0a\x88\x00location" + OTHER,
    "longer size": b"\x0a\x88\x80\x80\x00location" + OTHER,
    "long tag": b"\x8a\x00\x08location" + OTHER,
    "long tag of the value": KEY + b"\x92\x00" + OTHER[1:],
    "value first": OTHER + KEY,
    "another key before": b"\x0a\x01x" + KEY + OTHER,
    "the bundle, then another": KEY + BUNDLE + OTHER,
    "the bundle after what looks like its beginning": b"\x7a\x03\x6a\x8d\x02" + KEY + BUNDLE + OTHER,
    "an unknown number before": b"\x78\xff\x01" + KEY + OTHER,
}
"""Entries of external data, each read by protobuf as the location `SECRET`."""


def spelled(entry: bytes) -> bytes:
    """The graph whose entry of the location is these bytes, which must not be shorter than the usual ones."""
    usual_nbytes = len(KEY) + 2
    value = "p" * (len(entry) - usual_nbytes)
    if len(value) >= 128:
        value = value[:-1]  # its size takes a byte more
    graph = graph_with(value)
    at = graph.index(KEY)
    return graph[:at] + entry + graph[at + len(entry) :]


@pytest.mark.parametrize("name", SPELLINGS)
def test_unusual_spellings_hide_no_file(name: str):
    graph = spelled(SPELLINGS[name])
    assert location_in(graph) == SECRET
    with pytest.raises(ForeignLocation):
        relocate_graph(graph, "a.dsmodel", MEMBER)


def test_every_way_to_a_tensor_is_known():
    """onnx's own description of its messages, searched for those that lead to a tensor."""
    messages = {
        name: [field for field in descriptor.fields if field.message_type is not None]
        for name, descriptor in onnx.onnx_ml_pb2.DESCRIPTOR.message_types_by_name.items()
    }
    leading = {"TensorProto"}
    for _ in messages:
        leading |= {name for name, fields in messages.items() if {f.message_type.name for f in fields} & leading}
    found = {
        name: {field.number: field.message_type.name for field in messages[name] if field.message_type.name in leading}
        for name in leading - {"TensorProto"}
    }
    assert found == LEADS_TO


@given(data=st.data())
def test_any_damage_is_refused_or_leaves_the_bundle_as_the_only_file(data: st.DataObject):
    graph = bytearray(graph_with(STORED_LOCATION))
    for _ in range(data.draw(st.integers(1, 3))):
        graph[data.draw(st.integers(0, len(graph) - 1))] = data.draw(st.integers(0, 255))
    try:
        relocated = relocate_graph(bytes(graph), "a.dsmodel", MEMBER)
    except ForeignLocation:
        return
    try:
        model = onnx.load_model_from_string(relocated)
    except DecodeError:
        return
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            assert entry.key != "location" or os.path.normpath(entry.value) == "a.dsmodel"


def field(number: int, data: bytes) -> bytes:
    """A field of bytes, as protobuf writes it."""
    size, head = len(data), [number << 3 | 2]
    while size >= 128:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes([*head, size]) + data


@pytest.mark.parametrize(("n_graphs", "says"), [(30, "tensor 'w'"), (40, "as onnx writes it is required")])
def test_graphs_in_graphs_are_followed_as_far_as_protobuf_does(n_graphs: int, says: str):
    graph = onnx.load_model_from_string(graph_with("../other.bin")).graph.SerializeToString()
    for _ in range(n_graphs):
        graph = field(1, field(5, field(6, graph)))  # the graph of an attribute of a node of a graph
    with pytest.raises(ForeignLocation, match=says):
        relocate_graph(field(7, graph), "a.dsmodel", MEMBER)


def test_a_tag_of_more_than_32_bits_hides_no_graph():
    """protobuf in C++, which onnxruntime reads with, drops the bits above and takes it for the graph's own tag."""
    graph = onnx.load_model_from_string(graph_with("../other.bin")).graph.SerializeToString()
    with pytest.raises(ForeignLocation, match="as onnx writes it is required, byte 0"):
        relocate_graph(b"\xba\x80\x80\x80\x10" + field(7, graph)[1:], "a.dsmodel", MEMBER)


def test_a_graph_without_external_data_stays_as_it_is():
    model = onnx.load_model_from_string(graph_with("x"))
    model.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(WEIGHT, "location"))
    graph = model.SerializeToString()
    assert relocate_graph(graph, "a.dsmodel", MEMBER) == graph
