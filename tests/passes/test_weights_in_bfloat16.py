import ml_dtypes
import numpy as np
import pytest
from native_operator import library
from pass_graphs import assert_same_results, ops, run, text_model

from dsc.passes.attach_bodies import AttachBodiesPass
from dsc.passes.fuse_dense_matmul import FuseDenseMatMulPass
from dsc.passes.verify_graph import verify_graph
from dsc.passes.weights_in_bfloat16 import WeightsInBfloat16Pass

TRAINED = np.random.default_rng(0).standard_normal((70, 40)).astype(np.float32)
W = TRAINED.astype(ml_dtypes.bfloat16).astype(np.float32)


def tied(w=W):
    return text_model(
        """agraph (float[batch, seq, 40] x, int64[batch, seq] ids, float[70, 40] w)
        => (float[batch, seq, 70] y, float[batch, seq, 40] e)
        { y = com.microsoft.FusedMatMul<transB=1>(x, w) e = Gather(w, ids) }""",
        w=w,
    )


def feeds(batch, seq, rng):
    x = rng.standard_normal((batch, seq, 40)).astype(np.float32)
    return {"x": x, "ids": rng.integers(0, 70, (batch, seq))}


def test_product_and_gather_read_bfloat16_with_and_without_the_library():
    floats, model = tied(), tied()
    assert WeightsInBfloat16Pass()(model).fired == 2
    verify_graph(model)
    assert_same_results(tied(), model, feeds)  # onnxruntime's own operators: the casts are folded
    (name,) = model.graph.initializers
    assert name == "w.bfloat16"
    for one in (floats, model):
        FuseDenseMatMulPass()(one)
        AttachBodiesPass()(one)
    verify_graph(model)
    assert ops(model) == ["DenseMatMul", "Gather", "Cast"]
    assert_same_results(tied(), model, feeds)
    fed = feeds(2, 3, np.random.default_rng(1))
    found, wanted = (run(one, fed, library=library()) for one in (model, floats))
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name])


@pytest.mark.parametrize("at", [(0, 0), (69, 39)])
def test_one_weight_with_more_digits_keeps_the_floats(at):
    w = W.copy()
    w[at] += np.float32(2**-20)
    result = WeightsInBfloat16Pass()(tied(w))
    assert not result.modified
    assert "zeros in their lower halves" in str(result.skipped[0])


def test_special_values_are_halves_too():
    w = W.copy()
    w[0, :4] = np.nan, np.inf, -0.0, 1e-40 * 0
    model = tied(w)
    assert WeightsInBfloat16Pass()(model).fired == 2
    found = run(model, {"x": np.zeros((1, 1, 40), np.float32), "ids": np.array([[0]])})
    np.testing.assert_array_equal(found["e"][0, 0], w[0])


@pytest.mark.parametrize("other", ["Neg(w)", "Gather<axis=1>(w, ids)"])
def test_a_matrix_that_something_else_reads_stays(other):
    model = text_model(
        f"""agraph (float[s, 40] x, int64[n] ids, float[70, 40] w) => (float[s, 70] y, float[a, b] z)
        {{ y = com.microsoft.FusedMatMul<transB=1>(x, w) z = {other} }}""",
        w=W,
    )
    result = WeightsInBfloat16Pass()(model)
    assert not result.modified
    assert "something else reads it" in str(result.skipped[0])
