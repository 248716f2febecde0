import numpy as np
from pass_graphs import ops, text_model

from dsc.passes.remove_unused import RemoveUnusedPass
from dsc.passes.verify_graph import verify_graph


def test_what_no_output_needs_goes():
    model = text_model(
        "agraph (float[B, 4] x, float[4] w, int64[B] ids) => (float[B, 4] y) { a = Add(x, w) b = Neg(a) y = Relu(x) }",
        w=np.ones(4, np.float32),
    )
    result = RemoveUnusedPass()(model)
    verify_graph(model)
    assert ops(model) == ["Relu"]
    assert not model.graph.initializers
    assert [value.name for value in model.graph.inputs] == ["x", "ids"]
    assert set(model.opset_imports) == {""}
    assert result.fired == 5
    assert not RemoveUnusedPass()(model).modified
