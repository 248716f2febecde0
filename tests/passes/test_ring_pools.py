import numpy as np
import onnx_ir as ir
import pytest
from pass_graphs import run, text_model

from dsc.passes.attach_bodies import AttachBodiesPass
from dsc.passes.ring_pools import RingPoolsPass, ring_layers
from dsc.passes.verify_graph import verify_graph

HQ, HKV, D = 2, 1, 8
POOL = f"float[batch, {HKV}, max_rows, {D}]"
HEADS = f"float[batch, {HQ}, seq, {D}]"


def graph(window, pool="kp", more=""):
    model = text_model(
        f"""agraph ({HEADS} q, float[batch, {HKV}, seq, {D}] k, float[batch, {HKV}, seq, {D}] v,
            {POOL} kp, {POOL} vp, int32[batch] past)
          => ({HEADS} o, {POOL} kpo, {POOL} vpo) <{POOL} same>
          {{ {more}
             o, kpo, vpo = ai.dspark.VerifyAttention<scale=0.2, window={window}>(q, k, v, {pool}, vp, past) }}"""
    )
    names = {"kp": "k_pool.0", "vp": "v_pool.0"}
    values = [value for value in model.graph.inputs if value.name in names]
    ir.convenience.rename_values(values, [names[str(value.name)] for value in values])
    return model


def rows(model):
    values = (*model.graph.inputs, *model.graph.outputs)
    return {str(value.shape[2]) for value in values if "p" in str(value.name) and len(value.shape) == 4}


def test_pools_behind_a_window_are_named_apart_once():
    model = graph(window=5)
    assert RingPoolsPass()(model).fired == 1
    assert rows(model) == {"ring_rows_5"}
    assert ring_layers(model) == {0}
    assert not RingPoolsPass()(model).modified
    verify_graph(model)


@pytest.mark.parametrize(
    ("window", "pool", "more"),
    [(-1, "kp", ""), (5, "same", "same = Identity(kp)"), (5, "kp", "same = Identity(kp)")],
    ids=["no window", "not a graph input", "read by something else"],
)
def test_other_pools_stay_as_they_are(window, pool, more):
    model = graph(window, pool, more)
    assert RingPoolsPass()(model).fired == 0
    assert rows(model) == {"max_rows"}
    assert ring_layers(model) == frozenset()


def test_the_graph_gives_the_same_over_a_ring_and_over_a_long_pool():
    model = graph(window=5)
    for graph_pass in (RingPoolsPass(), AttachBodiesPass()):
        graph_pass(model)
    rng = np.random.default_rng(3)
    shapes = {"q": (1, HQ, 3, D), "k": (1, HKV, 3, D), "v": (1, HKV, 3, D)}
    feeds = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    feeds |= {"past": np.array([29], np.int32)}
    long = {name: rng.standard_normal((1, HKV, 40, D), dtype=np.float32) for name in ("k_pool.0", "v_pool.0")}
    ring = {name: np.zeros((1, HKV, 7, D), np.float32) for name in long}
    for name, pool in ring.items():
        pool[:, :, np.arange(22, 29) % 7] = long[name][:, :, 22:29]
    wanted, found = run(model, feeds | long), run(model, feeds | ring)
    np.testing.assert_allclose(found["o"], wanted["o"], atol=1e-6)
    np.testing.assert_array_equal(found["kpo"][:, :, np.arange(29, 32) % 7], wanted["kpo"][:, :, 29:32])
