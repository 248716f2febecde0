import numpy as np
from pass_graphs import assert_same_results, ops, text_model

from dsc.passes.eliminate_common_subexpressions import EliminateCommonSubexpressionsPass
from dsc.passes.verify_graph import verify_graph

TEXT = """agraph (float[batch, seq, 4] a) => (float[batch, seq, 4] y, float[batch, seq, 4] z)
{ c1 = Cos(a) s1 = Sin(c1) c2 = Cos(a) s2 = Sin(c2) y = Add(s1, s2) z = Add(s2, s1) }"""


def feeds(batch, seq, rng):
    return {"a": rng.standard_normal((batch, seq, 4)).astype(np.float32)}


def test_chains_of_equal_nodes_are_merged_and_outputs_keep_their_names():
    model = text_model(TEXT)
    result = EliminateCommonSubexpressionsPass()(model)
    verify_graph(model)
    assert ops(model)[:2] == ["Cos", "Sin"]
    assert result.fired >= 2
    assert [value.name for value in model.graph.outputs] == ["y", "z"]
    assert_same_results(text_model(TEXT), model, feeds)
    assert not EliminateCommonSubexpressionsPass()(model).modified


def test_different_attributes_and_random_nodes_stay():
    model = text_model(
        """agraph (float[B, 4] a) => (float[B, 4] y, float[B, 4] z, float[B, 4] u, float[B, 4] v)
        { y = Softmax<axis=0>(a) z = Softmax<axis=1>(a) u = RandomUniformLike(a) v = RandomUniformLike(a) }"""
    )
    assert not EliminateCommonSubexpressionsPass()(model).modified
