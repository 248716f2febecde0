import numpy as np
from native_operator import library
from pass_graphs import assert_same_results, ops, run, text_model

from dsc.passes.attach_bodies import AttachBodiesPass
from dsc.passes.fuse_dense_matmul import FuseDenseMatMulPass
from dsc.passes.verify_graph import verify_graph

W = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)


def feeds(batch, seq, rng):
    return {"x": rng.standard_normal((batch, seq, 8)).astype(np.float32)}


def by_rows():
    return text_model(
        """agraph (float[batch, seq, 8] x, float[5, 8] w) => (float[batch, seq, 5] y, float[batch, seq, 5] z)
        { y = com.microsoft.FusedMatMul<transB=1>(x, w) n = Neg(x) z = com.microsoft.FusedMatMul<transB=1>(n, w) }""",
        w=W,
    )


def test_body_and_library_compute_what_the_product_does():
    model = by_rows()
    assert FuseDenseMatMulPass()(model).fired == 2
    AttachBodiesPass()(model)
    verify_graph(model)
    assert ops(model) == ["DenseMatMul", "Neg", "DenseMatMul"]
    assert_same_results(by_rows(), model, feeds)
    x = feeds(2, 3, np.random.default_rng(1))
    found = run(model, x, library=library())
    np.testing.assert_allclose(found["y"], x["x"] @ W.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["z"], -x["x"] @ W.T, rtol=1e-5, atol=1e-5)


def test_a_matrix_by_columns_or_a_scaled_product_stays():
    for product in ("MatMul(x, w)", "com.microsoft.FusedMatMul<transB=1, alpha=2.0>(x, w)"):
        model = text_model(
            f"agraph (float[s, 8] x, float[8, 8] w) => (float[s, 8] y) {{ y = {product} }}", w=W[[0] * 8]
        )
        assert not FuseDenseMatMulPass()(model).modified
    columns = text_model("agraph (float[s, 8] x, float[8, 5] w) => (float[s, 5] y) { y = MatMul(x, w) }", w=W.T.copy())
    assert "stored as [n, k]" in str(FuseDenseMatMulPass()(columns).skipped[0])
