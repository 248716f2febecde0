import numpy as np
import onnx_ir as ir
import pytest
from native_operator import library
from pass_graphs import assert_same_results, ops, text_model

from dsc.passes.attach_bodies import AttachBodiesPass
from dsc.passes.fuse_swiglu import FuseSwigluPass
from dsc.passes.merge_gate_up import MergeGateUpPass
from dsc.passes.quantize_weights import QuantizeWeightsPass
from dsc.passes.verify_graph import verify_graph

G, U = (np.random.default_rng(s).standard_normal((64, 96)).astype(np.float32) / 8 for s in (0, 1))
SILU = "a = Sigmoid(g) s = Mul(g, a)"


def gated(activation=SILU, joined="h = Mul(s, u)"):
    """Two products and their gate, as an exporter writes them."""
    return text_model(
        f"""agraph (float[batch, seq, 64] x, float[64, 96] wg, float[64, 96] wu) => (float[batch, seq, 96] h)
        <float[batch, seq, 96] g, float[batch, seq, 96] u> {{
          g = MatMul(x, wg) u = MatMul(x, wu) {activation} {joined} }}""",
        wg=G,
        wu=U,
    )


def halves(activation=SILU, split="g, u = Split<axis=-1, num_outputs=2>(x)", inner=32):
    """A checkpoint's own product of gate and up, cut in two."""
    return text_model(
        f"""agraph (float[batch, seq, 64] x) => (float[batch, seq, {inner}] h)
        <float[batch, seq, {inner}] g, float[batch, seq, {64 - inner}] u> {{ {split} {activation} h = Mul(s, u) }}"""
    )


def feeds(batch, seq, rng):
    return {"x": 4 * rng.standard_normal((batch, seq, 64)).astype(np.float32)}


@pytest.mark.parametrize("native", [False, True], ids=["body", "native"])
@pytest.mark.parametrize("quantised", [False, True], ids=["floats", "blocks"])
@pytest.mark.parametrize("joined", ["h = Mul(s, u)", "h = Mul(u, s)"])
def test_a_gated_layer_becomes_a_product_and_one_node(native, quantised, joined):
    model, reference = gated(joined=joined), gated(joined=joined)
    for one in (model, reference):
        if quantised:
            QuantizeWeightsPass()(one)
    MergeGateUpPass()(model)
    assert FuseSwigluPass()(model).fired == 1
    for one in (model, reference):
        AttachBodiesPass()(one)
        verify_graph(one)
    assert ops(model) == ["BlockMatMul" if quantised else "MatMul", "SwiGlu"]
    # onnxruntime and the native kernels round the activations of a block product each in their own way
    limit = 2e-2 if native and quantised else 1e-4
    assert_same_results(reference, model, feeds, rtol=limit, atol=limit, library=library() if native else None)


@pytest.mark.parametrize("activation", [SILU, "a = Sigmoid(g) s = Mul(a, g)"])
def test_a_checkpoint_may_have_merged_them(activation):
    model = halves(activation)
    assert FuseSwigluPass()(model).fired == 1
    AttachBodiesPass()(model)
    assert ops(model) == ["SwiGlu"]
    assert_same_results(halves(activation), model, feeds, rtol=1e-4, atol=1e-5, library=library())


def test_swish_is_the_same_activation():
    model = halves("s = Swish<alpha=1.0>(g)")
    assert FuseSwigluPass()(model).fired == 1
    assert not FuseSwigluPass()(halves("s = Swish<alpha=1.5>(g)")).modified


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (halves('s = Gelu<approximate="tanh">(g)'), "not x sigmoid"),
        (halves("s = Sigmoid(g)"), "not x sigmoid"),
        (halves("n = Neg(g) a = Sigmoid(n) s = Mul(g, a)"), "not x sigmoid"),
    ],
)
def test_other_gates_are_left_with_their_reason(model, why):
    result = FuseSwigluPass()(model)
    assert not result.modified
    assert why in str(result.skipped[0])


def test_a_cut_along_another_axis_is_left():
    model = text_model(
        f"""agraph (float[2, 8, 64] x) => (float[1, 8, 64] h) <float[1, 8, 64] g, float[1, 8, 64] u>
        {{ g, u = Split<axis=0, num_outputs=2>(x) {SILU} h = Mul(s, u) }}"""
    )
    assert "last axis" in str(FuseSwigluPass()(model).skipped[0])


def test_half_precision_is_left():
    model = halves()
    next(iter(model.graph.inputs)).type = ir.TensorType(ir.DataType.FLOAT16)
    assert "float32" in str(FuseSwigluPass()(model).skipped[0])


def test_a_first_half_that_others_read_stays():
    model = text_model(
        f"""agraph (float[batch, seq, 64] x) => (float[batch, seq, 32] h, float y)
        <float[batch, seq, 32] g, float[batch, seq, 32] u> {{
          g, u = Split<axis=-1, num_outputs=2>(x) {SILU} h = Mul(s, u) y = ReduceSum<keepdims=0>(g) }}"""
    )
    before = model.clone()
    assert FuseSwigluPass()(model).fired == 1
    AttachBodiesPass()(model)
    assert set(ops(model)) == {"Split", "SwiGlu", "ReduceSum"}
    assert_same_results(before, model, feeds, rtol=1e-4)
