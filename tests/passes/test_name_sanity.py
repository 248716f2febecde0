import numpy as np
import onnx_ir as ir
from pass_graphs import assert_same_results, text_model

from dsc.passes.name_sanity import NameSanityPass
from dsc.passes.verify_graph import verify_graph

TEXT = """agraph (float[batch, seq, 4] x, float[4] relu_1) => (float[batch, seq, 4] y, float[batch, seq, 2] z)
{ relu_2 = Relu(x) relu_0 = Add(relu_2, relu_1) z, s1 = Split<axis=-1, num_outputs=2>(relu_0)
  a = Relu(relu_0) b = Relu(a) y = Neg(b) n = Concat<axis=-1>(s1, s1) }"""


def build():
    model = text_model(TEXT, relu_1=np.ones(4, np.float32))
    model.graph.node(0).metadata_props["pkg.torch.onnx.stack_trace"] = 'File "/home/me/model.py", line 3'
    model.graph.node(0).doc_string = "made here"
    return model


def test_names_come_from_the_graph_and_the_interface_keeps_its_own():
    model = build()
    assert NameSanityPass()(model).modified
    verify_graph(model)
    assert [v.name for v in [*model.graph.inputs, *model.graph.outputs]] == ["x", "y", "z"]
    assert list(model.graph.initializers) == ["relu_1"]
    assert [node.outputs[0].name for node in model.graph] == [
        "relu_0",
        "add_0",
        "z",
        "relu_2",
        "relu_3",
        "y",
        "concat_0",
    ]
    assert model.graph.node(2).outputs[1].name == "split_0_1"
    assert b"/home" not in ir.to_proto(model).SerializeToString()
    assert_same_results(build(), model, lambda b, s, r: {"x": r.standard_normal((b, s, 4)).astype(np.float32)})


def test_the_same_graph_gets_the_same_bytes_whatever_its_values_were_called():
    one, other = build(), build()
    for number, node in enumerate(other.graph):
        node.name = f"n{number}"
        for output in node.outputs:
            if not output.is_graph_output():
                output.name = f"v{number}{output.index()}"
    NameSanityPass()(one)
    NameSanityPass()(other)
    assert ir.to_proto(one).SerializeToString() == ir.to_proto(other).SerializeToString()
    assert not NameSanityPass()(one).modified
