import numpy as np
import pytest
from pass_graphs import assert_same_results, ops, run, text_model

from dsc.passes.fuse_rms_norm import FuseRmsNormPass
from dsc.passes.verify_graph import verify_graph

G = np.random.default_rng(0).uniform(0.5, 1.5, 16).astype(np.float32)


def build(order="y = Mul(g, n)"):
    model = text_model(
        f"""agraph (float[batch, seq, 16] x, float[16] g, float two, float eps, int64[1] axis)
        => (float[batch, seq, 16] y) <float[batch, seq, 16] n>
        {{ p = Pow(x, two) m = ReduceMean<keepdims=1, noop_with_empty_axes=0>(p, axis)
          e = Add(m, eps) s = Sqrt(e) r = Reciprocal(s)
          n = Mul(x, r) {order} }}""",
        g=G,
        two=np.array(2, np.float32),
        eps=np.array(1e-6, np.float32),
        axis=np.array([-1]),
    )
    return model


def feeds(batch, seq, rng):
    return {"x": rng.standard_normal((batch, seq, 16)).astype(np.float32)}


@pytest.mark.parametrize("order", ["y = Mul(g, n)", "y = Mul(n, g)"])
def test_the_spelled_out_norm_becomes_one_node(order):
    model = build(order)
    assert FuseRmsNormPass()(model).fired == 1
    verify_graph(model)
    assert ops(model) == ["RMSNormalization"]
    assert_same_results(build(order), model, feeds)
    big = np.full((1, 1, 16), 1e4, np.float32)
    np.testing.assert_allclose(run(model, {"x": big})["y"][0, 0], G, rtol=1e-5)


def test_an_old_opset_is_left_with_its_reason():
    model = build()
    model.opset_imports[""] = 21
    result = FuseRmsNormPass()(model)
    assert not result.modified
    assert "at least 23, got 21" in str(result.skipped[0])


def test_another_mean_is_left_with_its_reason():
    model = text_model(
        "agraph (float[B, 4] x, int64[1] axis) => (float[B, 1] y) { y = ReduceMean(x, axis) }", axis=np.array([-1])
    )
    assert "not the pattern" in str(FuseRmsNormPass()(model).skipped[0])
