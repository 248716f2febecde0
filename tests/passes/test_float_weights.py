import ml_dtypes
import numpy as np
import pytest
from pass_graphs import assert_same_results, ops, text_model

from dsc.passes.attach_bodies import AttachBodiesPass
from dsc.passes.float_weights import FloatWeightsPass
from dsc.passes.verify_graph import verify_graph
from dsc.passes.weights_in_bfloat16 import WeightsInBfloat16Pass
from dsc.passes.weights_in_int16 import WeightsInInt16Pass

RNG = np.random.default_rng(0)
STEPS = (RNG.integers(-8, 8, (7, 64)) * np.float32(0.0123)).astype(np.float32)
HALVES = RNG.standard_normal((7, 64)).astype(ml_dtypes.bfloat16).astype(np.float32)


def tied(w):
    return text_model(
        """agraph (float[batch, seq, 64] x, int64[batch, seq] ids, float[7, 64] w)
        => (float[batch, seq, 7] y, float[batch, seq, 64] e)
        { y = com.microsoft.FusedMatMul<transB=1>(x, w) e = Gather(w, ids) }""",
        w=w,
    )


def feeds(batch, seq, rng):
    return {"x": rng.standard_normal((batch, seq, 64)).astype(np.float32), "ids": rng.integers(0, 7, (batch, seq))}


@pytest.mark.parametrize(("there", "w"), [(WeightsInInt16Pass, STEPS), (WeightsInBfloat16Pass, HALVES)])
def test_it_is_what_it_was_before(there, w):
    model = tied(w)
    there()(model)
    AttachBodiesPass()(model)
    assert ops(model) != ["FusedMatMul", "Gather"]
    assert FloatWeightsPass()(model).fired == 2
    verify_graph(model)
    assert ops(model) == ["FusedMatMul", "Gather"]
    assert not model.functions
    (value,) = model.graph.initializers.values()
    np.testing.assert_array_equal(value.const_value.numpy(), w)
    assert_same_results(tied(w), model, feeds)


def test_floats_stay_and_so_does_arithmetic_in_bfloat16():
    assert not FloatWeightsPass()(tied(STEPS)).modified
    half = text_model(
        """agraph (bfloat16[s, 64] x, bfloat16[64, 7] w) => (float[s, 7] y) { p = MatMul(x, w) y = Cast<to=1>(p) }""",
        w=HALVES.T.astype(ml_dtypes.bfloat16),
    )
    assert not FloatWeightsPass()(half).modified
