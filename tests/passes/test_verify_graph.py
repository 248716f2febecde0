import numpy as np
import onnx_ir as ir
import pytest
from pass_graphs import text_model

from dsc.bundle_schema.errors import PassError
from dsc.passes.verify_graph import verify_graph


def model():
    return text_model(
        "agraph (float[B, 4] x, float[4, 3] w) => (float[B, 3] y) { h = MatMul(x, w) y = Relu(h) }",
        w=np.ones((4, 3), np.float32),
    )


def test_a_whole_graph_passes_and_is_left_as_it_is():
    whole = model()
    verify_graph(whole)
    assert [v.name for v in whole.graph.inputs] == ["x"]
    assert list(whole.graph.initializers) == ["w"]


def order(m):
    relu = m.graph.node(1)
    m.graph.remove(relu)
    m.graph.insert_before(m.graph.node(0), relu)


def dangling(m):
    m.graph.node(1).replace_input_with(0, ir.Value(name="nowhere"))


def twin_names(m):
    m.graph.node(0).outputs[0].name = "y"


def no_shape(m):
    m.graph.outputs[0].shape = None


def wrong_shape(m):
    m.graph.outputs[0].shape = ir.Shape(["B", 4])


def wrong_type(m):
    m.graph.outputs[0].type = ir.TensorType(ir.DataType.INT64)


def other_content(m):
    m.graph.initializers["w"].const_value = ir.tensor(np.ones((3, 3), np.float32))


def other_dtype(m):
    m.graph.initializers["w"].const_value = ir.tensor(np.ones((4, 3), np.float16))


def unknown_domain(m):
    m.graph.node(1).domain = "nobody"


def undefined_output(m):
    m.graph.outputs[0] = ir.Value(name="z", shape=ir.Shape(["B", 3]), type=ir.TensorType(ir.DataType.FLOAT))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (order, "before anything defines it"),
        (dangling, "'nowhere' before anything defines it"),
        (twin_names, "'y'.*two values"),
        (no_shape, "output 'y'.*no shape"),
        (wrong_shape, "checker refuses"),
        (wrong_type, "checker refuses"),
        (other_content, "initializer 'w'.*holds"),
        (other_dtype, "initializer 'w'.*holds"),
        (unknown_domain, "no opset import"),
        (undefined_output, "output 'z'.*nothing"),
    ],
)
def test_damage_is_found(damage, message):
    broken = model()
    damage(broken)
    with pytest.raises(PassError, match=message):
        verify_graph(broken)
