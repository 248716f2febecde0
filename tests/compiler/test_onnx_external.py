"""External data wherever a graph can hold a tensor, under any file name, and inside the model's folder only."""

from __future__ import annotations

import shutil

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from nested_graph import ARRAYS, N, nested_model, result, tensors
from onnx import numpy_helper
from onnx_exports import externalise

from dsc.bundle_schema.errors import ModelError
from dsc.compiler import onnx_external
from dsc.compiler.onnx_external import read_onnx


def save(folder, model, location):
    """Write model.onnx; each tensor's data goes to the file that `location(name)` names."""
    for name, tensor in tensors(model).items():
        file = folder / location(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        externalise(tensor, file, numpy_helper.to_array(tensor))
        place(tensor, location(name))
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx"


def place(tensor, location):
    next(entry for entry in tensor.external_data if entry.key == "location").value = location


@pytest.mark.parametrize(
    "location",
    ["model.onnx.data", "{}.bin", "./{}", "weights/{}/3f786850e387550fdab836ed7e6dc881"],
    ids=["one file", "one a tensor", "with a dot", "in folders"],
)
def test_data_of_initializers_branches_and_functions_come_along(tmp_path, location):
    model = read_onnx(save(tmp_path / "source", nested_model(), location.format))
    whole = ir.to_proto(model).SerializeToString()
    shutil.rmtree(tmp_path / "source")
    session = ort.InferenceSession(whole, providers=["CPUExecutionProvider"])
    x = np.arange(N, dtype=np.float32)
    for flag in (True, False):
        found = session.run(["y"], {"x": x, "flag": np.array(flag)})[0]
        np.testing.assert_allclose(found, result(x, flag), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize(
    ("location", "says"),
    [
        ("gone.bin", "'gone.bin' is required beside the graph"),
        ("../secret.bin", "must lie inside the model's folder"),
        ("weights/../../secret.bin", "must lie inside the model's folder"),
        ("..\\secret.bin", "must lie inside the model's folder"),
        ("C:secret.bin", "must lie inside the model's folder"),
        ("*/_ORT_MEM_ADDR_/*", "is required beside the graph"),  # onnxruntime's name of its own memory
    ],
)
def test_a_tensor_anywhere_whose_data_are_elsewhere_is_named(tmp_path, name, location, says):
    (tmp_path / "secret.bin").write_bytes(bytes(4 * N))
    model = nested_model()
    path = save(tmp_path / "source", model, "{}.bin".format)
    place(tensors(model)[name], location)
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=f"tensor '{name}'") as refusal:
        read_onnx(path)
    assert says in str(refusal.value)


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_what_stays_inside_the_graph_is_limited_exactly(tmp_path, monkeypatch, spare):
    """A function's constant cannot become an initializer: it counts against what a protobuf may hold."""
    monkeypatch.setattr(onnx_external, "MAX_INLINE_NBYTES", 4 * N + spare)
    path = save(tmp_path, nested_model(), "{}.bin".format)
    if spare >= 0:
        read_onnx(path)
        return
    with pytest.raises(ModelError, match=rf"tensor 'inner': attributes may hold {4 * N - 1} bytes in all"):
        read_onnx(path)
