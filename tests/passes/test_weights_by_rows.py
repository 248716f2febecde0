import numpy as np
from pass_graphs import assert_same_results, ops, text_model

from dsc.passes.fold_constants import FoldConstantsPass
from dsc.passes.verify_graph import verify_graph
from dsc.passes.weights_by_rows import WeightsByRowsPass

RNG = np.random.default_rng(0)
W = RNG.standard_normal((8, 5)).astype(np.float32)


def feeds(batch, seq, rng):
    return {"x": rng.standard_normal((batch, seq, 8)).astype(np.float32)}


def by_columns():
    return text_model(
        """agraph (float[batch, seq, 8] x, float[8, 5] w) => (float[batch, seq, 5] y, float[batch, seq, 5] z)
        { y = MatMul(x, w) n = Neg(x) z = MatMul(n, w) }""",
        w=W,
    )


def test_a_matrix_is_turned_once_for_all_its_products():
    model = by_columns()
    assert WeightsByRowsPass()(model).fired == 1
    verify_graph(model)
    assert ops(model) == ["FusedMatMul", "Neg", "FusedMatMul"]
    np.testing.assert_array_equal(model.graph.initializers["w"].const_value.numpy(), W.T)
    assert_same_results(by_columns(), model, feeds)
    assert not WeightsByRowsPass()(model).modified


def test_a_matrix_that_was_turned_before_is_the_checkpoints_again():
    def build():
        return text_model(
            """agraph (float[batch, seq, 8] x, float[5, 8] w) => (float[batch, seq, 5] y)
            { t = Transpose<perm=[1, 0]>(w) y = MatMul(x, t) }""",
            w=W.T.copy(),
        )

    model = build()
    before = model.graph.initializers["w"].const_value
    FoldConstantsPass()(model)
    WeightsByRowsPass()(model)
    assert model.graph.initializers["w"].const_value is before
    assert_same_results(build(), model, feeds)


def test_a_matrix_that_something_else_reads_stays():
    model = text_model(
        """agraph (float[batch, seq, 8] x, float[8, 5] w, int64[n] ids) => (float[batch, seq, 5] y, float[n, 5] e)
        { y = MatMul(x, w) e = Gather(w, ids) }""",
        w=W,
    )
    result = WeightsByRowsPass()(model)
    assert not result.modified
    assert "something else reads" in str(result.skipped[0])
