import numpy as np
import pytest
from pass_graphs import ops, run, text_model

from dsc.passes.fold_constants import FoldConstantsPass
from dsc.passes.lower_block_matmul import LowerBlockMatMulPass
from dsc.passes.merge_qkv import MergeQkvPass
from dsc.passes.quantize_weights import QuantizeWeightsPass
from dsc.passes.verify_graph import verify_graph

RNG = np.random.default_rng(0)
W = {name: RNG.standard_normal((n, 64)).astype(np.float32) / 8 for name, n in (("q", 64), ("k", 32), ("v", 32))}
B = {f"{name}b": RNG.standard_normal(len(w)).astype(np.float32) for name, w in W.items()}
POOL = "float[batch, 2, max_rows, 16]"


def build(bias=False, rotary=0):
    products = " ".join(
        f"t{n} = Transpose<perm=[1, 0]>({n}) {n}m = MatMul(x, t{n}) {n}p = "
        + (f"Add({n}m, {n}b)" if bias else f"Identity({n}m)")
        for n in W
    )
    text = f"""agraph (float[batch, seq, 64] x, float[64, 64] q, float[32, 64] k, float[32, 64] v,
      float[64] qb, float[32] kb, float[32] vb, {POOL} kp, {POOL} vp, int32[batch] last, int32 total)
      => (float[batch, seq, 64] y, {POOL} kpo, {POOL} vpo)
      <float[batch, seq, 64] qm, float[batch, seq, 32] km, float[batch, seq, 32] vm,
       float[batch, seq, 64] qp, float[batch, seq, 32] kp2>
      {{ {products}
        y, kpo, vpo = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2, do_rotary={rotary}>(
          qp, kp_, vp_, kp, vp, last, total) }}"""
    text = text.replace("kp = Identity", "kp_ = Identity").replace("kp = Add", "kp_ = Add")
    text = text.replace("vp = Identity", "vp_ = Identity").replace("vp = Add", "vp_ = Add")
    text = text.replace("float[batch, seq, 32] kp2", "float[batch, seq, 32] kp_")
    model = text_model(text, **W, **B)
    from onnx_ir.passes.common import IdentityEliminationPass

    IdentityEliminationPass()(model)
    return model


def feeds(batch, seq, past):
    rng = np.random.default_rng(batch)
    return {
        "x": rng.standard_normal((batch, seq, 64)).astype(np.float32),
        "kp": rng.standard_normal((batch, 2, 16, 16)).astype(np.float32),
        "vp": rng.standard_normal((batch, 2, 16, 16)).astype(np.float32),
        "last": np.full(batch, past + seq - 1, np.int32),
        "total": np.array(past + seq, np.int32),
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
    assert ops(model) == ["BlockMatMul" if quantised else "MatMul", *(["Add"] if bias else []), "GroupQueryAttention"]
    assert not {"q", "k", "v"} & set(model.graph.initializers)
    if quantised:
        LowerBlockMatMulPass()(model)
        LowerBlockMatMulPass()(reference)
    for batch, seq, past in ((1, 1, 5), (1, 4, 5), (2, 1, 3), (3, 4, 0)):
        given = feeds(batch, seq, past)
        wanted, got = run(reference, given), run(model, given)
        used = slice(0, past + seq)
        np.testing.assert_allclose(got["y"], wanted["y"], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(got["kpo"][:, :, used], wanted["kpo"][:, :, used], rtol=1e-5, atol=1e-5)


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
