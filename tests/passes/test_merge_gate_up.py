import numpy as np
import pytest
from pass_graphs import assert_same_results, ops, text_model

from dsc.passes.fold_constants import FoldConstantsPass
from dsc.passes.lower_block_matmul import LowerBlockMatMulPass
from dsc.passes.merge_gate_up import MergeGateUpPass
from dsc.passes.quantize_weights import QuantizeWeightsPass
from dsc.passes.verify_graph import verify_graph

G, U = (np.random.default_rng(s).standard_normal((64, 96)).astype(np.float32) / 8 for s in (0, 1))
SILU = "a = Sigmoid(g) s = Mul(g, a) h = Mul(s, u)"


def build(activation=SILU, second="u = MatMul(x, wu)"):
    return text_model(
        f"""agraph (float[batch, seq, 64] x, float[64, 96] wg, float[64, 96] wu) => (float[batch, seq, 96] h)
        <float[batch, seq, 96] g, float[batch, seq, 96] u> {{ g = MatMul(x, wg) {second} {activation} }}""",
        wg=G,
        wu=U,
    )


def feeds(batch, seq, rng):
    return {"x": rng.standard_normal((batch, seq, 64)).astype(np.float32)}


@pytest.mark.parametrize(
    "activation", [SILU, 's = Gelu<approximate="tanh">(g) h = Mul(u, s)', "s = Relu(g) h = Mul(s, u)"]
)
@pytest.mark.parametrize("quantised", [False, True])
def test_gate_and_up_become_one_product(activation, quantised):
    model, reference = build(activation), build(activation)
    if quantised:
        QuantizeWeightsPass()(model)
        QuantizeWeightsPass()(reference)
    result = MergeGateUpPass()(model)
    verify_graph(model)
    assert result.fired == 1
    assert ops(model)[:2] == ["BlockMatMul" if quantised else "MatMul", "Split"]
    if quantised:
        LowerBlockMatMulPass()(model)
        LowerBlockMatMulPass()(reference)
    assert_same_results(reference, model, feeds)


def test_the_up_projection_may_come_first():
    text = f"""agraph (float[batch, seq, 64] x, float[64, 96] wg, float[64, 96] wu)
      => (float[batch, seq, 96] h, float y) <float[batch, seq, 96] g, float[batch, seq, 96] u>
      {{ u = MatMul(x, wu) y = ReduceSum<keepdims=0>(u) g = MatMul(x, wg) {SILU} }}"""
    model = text_model(text, wg=G, wu=U)
    assert MergeGateUpPass()(model).fired == 1
    verify_graph(model)
    assert_same_results(text_model(text, wg=G, wu=U), model, feeds, rtol=1e-4)


def test_a_plain_product_of_two_projections_is_not_gated():
    assert not MergeGateUpPass()(build("h = Mul(g, u)")).modified


def test_different_inputs_are_not_merged():
    model = build(second="n = Neg(x) u = MatMul(n, wu)")
    FoldConstantsPass()(model)
    assert not MergeGateUpPass()(model).modified
    assert "Split" not in ops(model)


def test_a_shared_matrix_is_left_with_its_reason():
    model = build(second="u = MatMul(x, wg)")
    result = MergeGateUpPass()(model)
    assert "twice" in str(result.skipped[0])
