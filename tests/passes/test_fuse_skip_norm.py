import numpy as np
import pytest
from pass_graphs import assert_same_results, ops, run, text_model

from dsc.passes.fuse_skip_norm import FuseSkipNormPass
from dsc.passes.verify_graph import verify_graph

G = np.random.default_rng(0).uniform(0.5, 1.5, 64).astype(np.float32)
TEXT = """agraph (float[batch, seq, 64] a, float[batch, seq, 64] b, float[64] g)
=> (float[batch, seq, 64] n, float[batch, seq, 64] y)
{ s = Add(a, b) n = RMSNormalization<axis=-1, epsilon=1e-6>(s, g) y = Add(s, n) }"""


def build(text=TEXT):
    model = text_model(text, g=G)
    for node in model.graph:
        for output in node.outputs:
            output.shape = output.shape or model.graph.inputs[0].shape
            output.type = output.type or model.graph.inputs[0].type
    return model


def feeds(batch, seq, rng):
    return {name: rng.standard_normal((batch, seq, 64)).astype(np.float32) for name in "ab"}


def test_the_sum_and_its_norm_come_from_one_node():
    model = build()
    result = FuseSkipNormPass()(model)
    verify_graph(model)
    assert result.fired == 1
    assert ops(model) == ["SkipSimplifiedLayerNormalization", "Add"]
    assert [value.name for value in model.graph.outputs] == ["n", "y"]
    assert_same_results(build(), model, feeds)


def test_large_activations_keep_their_precision():
    model = build()
    FuseSkipNormPass()(model)
    big = {name: np.full((1, 2, 64), 300.0, np.float32) for name in "ab"}
    np.testing.assert_allclose(run(model, big)["n"], np.broadcast_to(G, (1, 2, 64)), rtol=1e-5)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("s = Add(a, b)", "s = Sub(a, b)", "not a sum"),
        ("s = Add(a, b)", "s = Add(a, g)", "shapes"),
        ("axis=-1, ", "axis=1, ", "last of three axes"),
        ("(s, g)", "(s, b)", "weight is not constant"),
        ("epsilon=1e-6", "epsilon=1e-6, stash_type=10", "float32"),
    ],
)
def test_what_does_not_fit_stays_and_says_why(old, new, why):
    model = build(TEXT.replace(old, new))
    result = FuseSkipNormPass()(model)
    assert not result.modified
    assert why in str(result.skipped[0])
