import numpy as np
import pytest
from native_operator import library
from pass_graphs import run, text_model

from dsc.passes.attach_bodies import AttachBodiesPass
from dsc.passes.pack_rows import PackRowsPass
from dsc.passes.verify_graph import verify_graph

HQ, HKV, D, M = 4, 2, 16, 40
POOL = f"float[batch, {HKV}, max_rows, {D}]"
HEADS = f"float[batch, {HQ}, seq, {D}]"


def graph(more="", result="o"):
    return text_model(
        f"""agraph ({HEADS} q, float[batch, {HKV}, seq, {D}] k, float[batch, {HKV}, seq, {D}] v,
            {POOL} kp, {POOL} vp, int32[batch] past)
          => ({HEADS} {result}, {POOL} kpo, {POOL} vpo) <{HEADS} p>
          {{ o, kpo, vpo = ai.dspark.VerifyAttention<scale=0.2>(q, k, v, kp, vp, past) {more} }}"""
    )


def values(counts, seed):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32)  # noqa: E731
    rows, slots = sum(counts), len(counts)
    heads = {"q": normal(1, HQ, rows, D), "k": normal(1, HKV, rows, D), "v": normal(1, HKV, rows, D)}
    pools = {"kp": normal(slots, HKV, M, D), "vp": normal(slots, HKV, M, D)}
    return heads, pools | {"past": rng.integers(0, M - max(counts), slots).astype(np.int32)}


@pytest.mark.parametrize("native", [False, True])
def test_packed_sequences_get_what_each_gets_alone(native):
    counts = [3, 0, 1, 5]
    heads, state = values(counts, 3)
    alone, packed = graph(), graph()
    assert PackRowsPass()(packed).fired == 1
    for model in (alone, packed):
        AttachBodiesPass()(model)
        verify_graph(model)
    found_in = library() if native else None
    offsets = np.cumsum([0, *counts], dtype=np.int32)
    found = run(packed, heads | state | {"row_offsets": offsets}, library=found_in)
    for slot, count in enumerate(counts):
        rows = slice(offsets[slot], offsets[slot + 1])
        if not count:
            np.testing.assert_array_equal(found["kpo"][slot], state["kp"][slot])
            continue
        own = {name: value[slot : slot + 1] for name, value in state.items()}
        one = {name: np.ascontiguousarray(value[:, :, rows]) for name, value in heads.items()}
        wanted = run(alone, one | own, library=found_in)
        np.testing.assert_allclose(found["o"][:, :, rows], wanted["o"], atol=2e-6)
        np.testing.assert_array_equal(found["kpo"][slot], wanted["kpo"][0])


def test_it_fires_once():
    model = graph()
    PackRowsPass()(model)
    assert not PackRowsPass()(model).modified


def test_a_graph_that_reads_the_lengths_elsewhere_is_left_alone():
    model = graph("f = Cast<to=1>(past) s = ReduceSum<keepdims=0>(f) p = Add(o, s)", result="p")
    before = [value.name for value in model.graph.inputs]
    (reason,) = PackRowsPass()(model).skipped
    assert "Cast reads past as well" in reason.why
    assert [value.name for value in model.graph.inputs] == before
