import numpy as np
import pytest
from native_operator import library
from pass_graphs import assert_same_results, ops, run, text_model

from dsc.passes.attach_bodies import AttachBodiesPass
from dsc.passes.fuse_dense_matmul import FuseDenseMatMulPass
from dsc.passes.verify_graph import verify_graph
from dsc.passes.weights_in_int16 import WeightsInInt16Pass

RNG = np.random.default_rng(0)
W = (RNG.integers(-8, 8, (7, 64)) * np.float32(0.0123)).astype(np.float32)
TRAINED = RNG.standard_normal((7, 64)).astype(np.float32)


def tied(w=W, ids="int64"):
    return text_model(
        f"""agraph (float[batch, seq, 64] x, {ids}[batch, seq] ids, float[7, 64] w)
        => (float[batch, seq, 7] y, float[batch, seq, 64] e)
        {{ y = com.microsoft.FusedMatMul<transB=1>(x, w) e = Gather(w, ids) }}""",
        w=w,
    )


def feeds(batch, seq, rng):
    x = rng.standard_normal((batch, seq, 64)).astype(np.float32)
    return {"x": x, "ids": rng.integers(0, 7, (batch, seq))}


def test_product_and_gather_read_16_bits_with_and_without_the_library():
    model = tied()
    assert WeightsInInt16Pass()(model).fired == 2
    AttachBodiesPass()(model)
    verify_graph(model)
    assert ops(model) == ["Int16MatMul", "Int16Gather"]
    sizes = {name: list(value.const_value.shape) for name, value in model.graph.initializers.items()}
    assert sizes == {"w.codes": [4, 8, 2, 8], "w.scales": [4, 2, 2]}
    assert_same_results(tied(), model, feeds)
    floats = tied()
    FuseDenseMatMulPass()(floats)
    AttachBodiesPass()(floats)
    fed = feeds(2, 3, np.random.default_rng(1))
    found, wanted = (run(one, fed, library=library()) for one in (model, floats))
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name])


def test_what_is_not_exact_stays_with_the_reason():
    model = tied(TRAINED)
    result = WeightsInInt16Pass()(model)
    assert not result.modified
    assert "more than 16 bits" in str(result.skipped[0])
    assert ops(model) == ["FusedMatMul", "Gather"]


def test_other_types_and_sizes_stay():
    odd = text_model(
        "agraph (float[s, 40] x, float[7, 40] w) => (float[s, 7] y) { y = com.microsoft.FusedMatMul<transB=1>(x, w) }",
        w=W[:, :40],
    )
    assert "40 weights a column" in str(WeightsInInt16Pass()(odd).skipped[0])
    half = text_model(
        """agraph (float16[s, 64] x, float16[7, 64] w) => (float16[s, 7] y)
        { y = com.microsoft.FusedMatMul<transB=1>(x, w) }""",
        w=W.astype(np.float16),
    )
    assert "FLOAT16" in str(WeightsInInt16Pass()(half).skipped[0])


@pytest.mark.parametrize(
    "other",
    ["Neg(w)", "Gather<axis=1>(w, ids)", "MatMul(x, t)"],
)
def test_a_matrix_that_something_else_reads_stays(other):
    model = text_model(
        f"""agraph (float[s, 64] x, int64[n] ids, float[7, 64] w) => (float[s, 7] y, float[a, b] z)
        {{ y = com.microsoft.FusedMatMul<transB=1>(x, w) t = Transpose<perm=[1, 0]>(w) z = {other} }}""",
        w=W,
    )
    result = WeightsInInt16Pass()(model)
    assert not result.modified
    assert "something else reads it" in str(result.skipped[0])


def test_ids_of_32_bits_keep_the_floats():
    assert not WeightsInInt16Pass()(tied(ids="int32")).modified
