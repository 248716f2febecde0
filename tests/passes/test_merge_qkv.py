import numpy as np
import pytest
from forward_graphs import N_LAYERS, forward_graph, step_feeds
from pass_graphs import ops, run, text_model

from dsc.passes.attach_bodies import AttachBodiesPass
from dsc.passes.fold_constants import FoldConstantsPass
from dsc.passes.lower_attention import LowerAttentionPass
from dsc.passes.lower_block_matmul import LowerBlockMatMulPass
from dsc.passes.merge_qkv import MergeQkvPass
from dsc.passes.quantize_weights import QuantizeWeightsPass
from dsc.passes.verify_graph import verify_graph

RNG = np.random.default_rng(0)
W = {name: RNG.standard_normal((n, 64)).astype(np.float32) / 8 for name, n in (("q", 64), ("k", 32), ("v", 32))}
B = {f"{name}b": RNG.standard_normal(len(w)).astype(np.float32) for name, w in W.items()}
SHAPES = {"qs": np.array([0, 0, 4, 16]), "ks": np.array([0, 0, 2, 16]), "g": np.ones(16, np.float32)}
POOL = "float[batch, 2, max_rows, 16]"


def build(bias=False, normed=False):
    """Attention without a rotary embedding over three products, their results normalised or not."""
    products = " ".join(
        f"t{n} = Transpose<perm=[1, 0]>({n}) {n}m = MatMul(x, t{n}) "
        + (f"{n}p = Add({n}m, {n}b) " if bias else "")
        + f"{n}r = Reshape({n}{'p' if bias else 'm'}, {'qs' if n == 'q' else 'ks'})"
        f" {n}{'t' if normed and n != 'v' else 'h'} = Transpose<perm=[0, 2, 1, 3]>({n}r)"
        for n in W
    )
    norms = "qh = RMSNormalization<axis=-1>(qt, g) kh = RMSNormalization<axis=-1>(kt, g)" if normed else ""
    notes = ", ".join(
        f"float[batch, seq, {len(w)}] {n}m, float[batch, {len(w) // 16}, seq, 16] {n}h"
        + (f", float[batch, seq, {len(w)}] {n}p" if bias else "")
        for n, w in W.items()
    )
    text = f"""agraph (int64[batch, seq] input_ids, float[batch, seq, 64] x, float[64, 64] q, float[32, 64] k,
      float[32, 64] v, float[64] qb, float[32] kb, float[32] vb, int64[4] qs, int64[4] ks, float[16] g,
      {POOL} kp0, {POOL} vp0, int32[batch] past)
      => (float[batch, 4, seq, 16] y, {POOL} kpo, {POOL} vpo) <{notes}>
      {{ {products} {norms} y, kpo, vpo = ai.dspark.VerifyAttention<scale=0.25>(qh, kh, vh, kp0, vp0, past) }}"""
    return text_model(text, **W, **B, **SHAPES)


def feeds(batch, seq, past):
    rng = np.random.default_rng(batch)
    return {
        "input_ids": np.zeros((batch, seq), np.int64),
        "x": rng.standard_normal((batch, seq, 64)).astype(np.float32),
        "kp0": rng.standard_normal((batch, 2, 16, 16)).astype(np.float32),
        "vp0": rng.standard_normal((batch, 2, 16, 16)).astype(np.float32),
        "past": np.full(batch, past, np.int32),
    }


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("quantised", [False, True])
def test_one_product_feeds_attention(bias, quantised):
    model, reference = build(bias), build(bias)
    for one in (model, reference):
        FoldConstantsPass()(one)
        if quantised:
            QuantizeWeightsPass()(one)
    result = MergeQkvPass()(model)
    verify_graph(model)
    assert result.fired == 1
    product = "BlockMatMul" if quantised else "MatMul"
    assert ops(model)[: 2 + bias] == [product, *(["Add"] if bias else []), "Split"]
    assert not {"q", "k", "v", "qb"} & set(model.graph.initializers)
    for one in (model, reference):
        LowerAttentionPass()(one)
        LowerBlockMatMulPass()(one)
    assert "Split" not in ops(model)
    verify_graph(model)
    for batch, seq, past in ((1, 1, 5), (1, 4, 5), (2, 1, 3), (3, 4, 0)):
        given = feeds(batch, seq, past)
        wanted, got = run(reference, given), run(model, given)
        used = slice(0, past + seq)
        np.testing.assert_allclose(got["y"], wanted["y"], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(got["kpo"][:, :, used], wanted["kpo"][:, :, used], rtol=1e-5, atol=1e-5)


def test_a_rotary_embedding_may_stand_between():
    model, plain = forward_graph(), forward_graph()
    FoldConstantsPass()(model)
    assert MergeQkvPass()(model).fired == N_LAYERS
    for one in (model, plain):
        AttachBodiesPass()(one)
    given = step_feeds(3, 4, batch=2)
    np.testing.assert_allclose(run(model, given)["logits"], run(plain, given)["logits"], rtol=1e-4, atol=1e-4)


def test_normalised_queries_and_keys_are_left_with_their_reason():
    model = build(normed=True)
    FoldConstantsPass()(model)
    result = MergeQkvPass()(model)
    assert not result.modified
    assert "RMSNormalization stands between projection and attention" in str(result.skipped[0])


def test_a_merged_product_is_left():
    model = forward_graph()
    FoldConstantsPass()(model)
    MergeQkvPass()(model)
    result = MergeQkvPass()(model)
    assert not result.modified
    assert "already" in str(result.skipped[0])


def test_matrices_still_behind_a_transpose_are_left():
    model = build()
    result = MergeQkvPass()(model)
    assert not result.modified
    assert "not products with constant matrices" in str(result.skipped[0])


def test_a_shared_matrix_is_not_copied():
    model = build()
    FoldConstantsPass()(model)
    node = next(node for node in model.graph if node.op_type == "MatMul" and node.inputs[1].name == "v")
    node.replace_input_with(1, model.graph.initializers["k"])
    result = MergeQkvPass()(model)
    assert not result.modified
    assert "twice" in str(result.skipped[0])


def test_a_bias_on_one_product_only_is_left():
    model = build(bias=True)
    FoldConstantsPass()(model)
    add = next(node for node in model.graph if node.op_type == "Add" and node.inputs[1].name == "vb")
    add.outputs[0].replace_all_uses_with(add.inputs[0])
    assert "some have none" in str(MergeQkvPass()(model).skipped[0])
