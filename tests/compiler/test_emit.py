"""Where tensors go when a bundle is written, at the exact limits."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from toy_bundle import toy_info, toy_plan

from dsc.bundle_schema.certificate import Certificate
from dsc.bundle_schema.container import open_bundle
from dsc.bundle_schema.dflash_config import DflashConfig
from dsc.bundle_schema.manifest import TokenizerEntry
from dsc.compiler.emit import INLINE_NBYTES, BundleContents, GraphPart, ModelPart, emit_bundle


def contents(arrays):
    """A bundle of one graph that adds up its initializers."""
    nodes, last = [], "x"
    for name in arrays:
        nodes.append(onnx.helper.make_node("Add", [last, name], [f"{name}_sum"]))
        last = f"{name}_sum"
    graph = onnx.helper.make_graph(
        nodes,
        "sum",
        [onnx.helper.make_tensor_value_info("x", 1, ["n"])],
        [onnx.helper.make_tensor_value_info(last, 1, ["n"])],
        [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    model = ir.from_proto(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)]))
    part = GraphPart("target/graph.onnx", "forward", model, "fp32")
    return BundleContents(
        name="sum",
        target=ModelPart(toy_info(), (part,)),
        draft_kind="none",
        draft=None,
        tokenizer={},
        tokenizer_verdict=TokenizerEntry(),
        n_shared=None,
        plans={"cpu": toy_plan(64)},
        config=DflashConfig(),
        certificate=Certificate(verdict="pass", device="none"),
        recipe={},
        sources={},
        licences={},
        created_by={},
    )


def read_back(path):
    """Name -> whether it lies outside the graph, and its bytes."""
    with open_bundle(path) as bundle:
        graph = onnx.load_from_string(bundle.read("target/graph.onnx")).graph
        found = {}
        for tensor in graph.initializer:
            external = tensor.data_location == onnx.TensorProto.EXTERNAL
            place = {item.key: item.value for item in tensor.external_data}
            start = int(place.get("offset", 0))
            data = bundle.map[start : start + int(place["length"])] if external else tensor.raw_data
            found[tensor.name] = (external, data)
        return found, bundle.weights()


@pytest.mark.parametrize("nbytes", [1, INLINE_NBYTES - 1, INLINE_NBYTES, INLINE_NBYTES + 1])
def test_a_tensor_lies_outside_the_graph_from_the_limit_on_exactly(tmp_path, nbytes):
    array = np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8)
    emit_bundle(tmp_path / "one.dsmodel", contents({"a": array}))
    found, weights = read_back(tmp_path / "one.dsmodel")
    assert found["a"] == (nbytes >= INLINE_NBYTES, array.tobytes())
    assert [weight.nbytes for weight in weights] == ([nbytes] if nbytes >= INLINE_NBYTES else [])


def test_equal_tensors_of_other_names_or_shapes_are_stored_once(tmp_path):
    array = np.arange(600, dtype=np.float32)
    emit_bundle(tmp_path / "one.dsmodel", contents({"a": array, "b": array.copy(), "c": array.reshape(1, 600)}))
    found, weights = read_back(tmp_path / "one.dsmodel")
    assert [len(weight.users) for weight in weights] == [3]
    assert {data for _, data in found.values()} == {array.tobytes()}


def test_writing_over_an_existing_bundle_gives_the_same_bytes_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "one.dsmodel"
    array = np.random.default_rng(0).normal(size=5000).astype(np.float32)
    emit_bundle(path, contents({"a": array}))
    first = path.read_bytes()
    emit_bundle(path, contents({"a": np.zeros(90_000, np.float32)}))
    emit_bundle(path, contents({"a": array}))
    assert path.read_bytes() == first
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
