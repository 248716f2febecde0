import numpy as np
import pytest
from pass_graphs import ops, run, text_model

from dsc.bundle_schema.errors import PassError
from dsc.passes.select_logit_rows import SelectLogitRowsPass
from dsc.passes.verify_graph import verify_graph

W = np.random.default_rng(0).standard_normal((8, 30)).astype(np.float32)
SOFTCAP = "y = MatMul(h, w) d = Div(y, c) t = Tanh(d) logits = Mul(t, c)"


def build(body, rows_input=False, axis="seq"):
    extra = ", int64[rows] logit_rows" if rows_input else ""
    model = text_model(
        f"agraph (float[batch, seq, 8] x, float[8, 30] w, float[1] c{extra}) => (float[batch, {axis}, 30] logits)"
        f" <float[batch, seq, 8] h> {{ h = Relu(x) {body} }}",
        w=W,
        c=np.array([5.0], np.float32),
    )
    return model


@pytest.mark.parametrize("body", ["logits = MatMul(h, w)", SOFTCAP])
def test_a_graph_without_the_input_gets_it(body):
    model, reference = build(body), build(body)
    assert SelectLogitRowsPass()(model).fired == 1
    verify_graph(model)
    assert [value.name for value in model.graph.inputs][-1] == "logit_rows"
    assert [str(dim) for dim in model.graph.outputs[0].shape] == ["batch", "rows", "30"]
    for batch, rows in ((1, [3]), (2, [0, 2]), (3, [])):
        x = np.random.default_rng(batch).standard_normal((batch, 4, 8)).astype(np.float32)
        wanted = run(reference, {"x": x})["logits"][:, rows]
        got = run(model, {"x": x, "logit_rows": np.array(rows, np.int64)})["logits"]
        np.testing.assert_allclose(got, wanted, atol=1e-5)
    assert not SelectLogitRowsPass()(model).modified


def test_a_late_selection_moves_before_the_head():
    body = "z = MatMul(h, w) logits = Gather<axis=1>(z, logit_rows)"
    model = build(body, rows_input=True, axis="rows")
    assert SelectLogitRowsPass()(model).fired == 1
    verify_graph(model)
    assert ops(model) == ["Relu", "Gather", "MatMul"]
    x = np.random.default_rng(0).standard_normal((2, 4, 8)).astype(np.float32)
    got = run(model, {"x": x, "logit_rows": np.array([1, 3])})["logits"]
    np.testing.assert_allclose(got, np.maximum(x[:, [1, 3]], 0) @ W, atol=1e-5)


def test_an_early_selection_stays():
    body = "s = Gather<axis=1>(h, logit_rows) logits = MatMul(s, w)"
    model = build(body, rows_input=True, axis="rows")
    assert not SelectLogitRowsPass()(model).modified


def test_a_graph_without_a_head_is_refused():
    with pytest.raises(PassError, match="required a product"):
        SelectLogitRowsPass()(build("logits = Softmax(h)", axis="seq"))
