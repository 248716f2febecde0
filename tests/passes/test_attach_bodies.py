import sys
from types import ModuleType

import numpy as np
import onnx_ir as ir
import pytest
from pass_graphs import ops, run, text_model

from dsc.bundle_schema.errors import PassError
from dsc.passes import attach_bodies
from dsc.passes.attach_bodies import AttachBodiesPass
from dsc.passes.verify_graph import verify_graph

TEXT = "agraph (float[B, 4] x) => (float[B, 4] y) { h = ai.dspark.Twice(x) y = ai.dspark.Twice(h) }"


@pytest.fixture
def twice(monkeypatch):
    def function_body(backend):
        x = ir.val("x")
        node = ir.node("Add", [x, x], name=f"add_for_{backend}")
        graph = ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 23})
        return ir.Function("ai.dspark", "Twice", graph=graph, attributes=[])

    module = ModuleType("body_of_twice")
    module.function_body = function_body
    monkeypatch.setitem(sys.modules, "body_of_twice", module)
    monkeypatch.setitem(attach_bodies.BODIES, "Twice", "body_of_twice")


@pytest.mark.usefixtures("twice")
def test_bare_onnxruntime_opens_a_graph_with_its_bodies():
    model = text_model(TEXT)
    assert AttachBodiesPass()(model).fired == 1
    verify_graph(model)
    assert ops(model) == ["Twice", "Twice"]
    assert [function.name for function in model.functions.values()] == ["Twice"]
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(run(model, {"x": x})["y"], 4 * x)
    assert not AttachBodiesPass()(model).modified


def test_an_operator_without_a_body_is_named():
    with pytest.raises(PassError, match="ai.dspark::Twice: has no function body.*BlockMatMul"):
        AttachBodiesPass()(text_model(TEXT))


def test_a_graph_of_standard_operators_needs_nothing():
    assert not AttachBodiesPass()(text_model("agraph (float[B] x) => (float[B] y) { y = Relu(x) }")).modified
