import numpy as np
import pytest
from pass_graphs import BATCHES_AND_LENGTHS, ops, run, text_model

from dsc.passes.constant_shapes import ConstantShapesPass

SPLIT_AND_BACK = """agraph (int64[batch, seq] ids, float[batch, seq, 12] x, int64[1] rest, int64[1] size, int64[1] none)
  => (float[batch, seq, 12] y) <float[batch, seq, heads, 4] h, int64[1] b, int64[1] s, int64[4] c, int64[3] d>
  { b = Shape<start=0, end=1>(ids) s = Shape<start=1, end=2>(ids) c = Concat<axis=0>(b, s, rest, size)
    h = Reshape<allowzero=1>(x, c) d = Concat<axis=0>(b, s, rest) y = Reshape(h, d) }"""


def model(text=SPLIT_AND_BACK):
    return text_model(text, rest=np.array([-1]), size=np.array([4]), none=np.array([0]))


def feeds(batch, seq):
    rng = np.random.default_rng(batch + 10 * seq)
    return {
        "ids": np.zeros((batch, seq), np.int64),
        "x": rng.standard_normal((batch, seq, 12)).astype(np.float32),
    }


def test_sizes_of_the_reshaped_value_become_constants():
    before, after = model(), model()
    result = ConstantShapesPass()(after)
    assert (result.fired, result.skipped) == (2, ())
    assert ops(after) == ["Reshape", "Reshape"]
    assert not any("allowzero" in node.attributes for node in after.graph)
    shapes = [node.inputs[1].const_value.numpy().tolist() for node in after.graph]
    assert shapes == [[0, 0, -1, 4], [0, 0, -1]]
    for batch, seq in BATCHES_AND_LENGTHS:
        given = feeds(batch, seq)
        np.testing.assert_array_equal(run(after, given)["y"], run(before, given)["y"])


@pytest.mark.parametrize(
    ("old", "new", "why", "left"),
    [
        ("(b, s, rest, size)", "(s, b, rest, size)", "size 0 is not that of axis 0", 1),
        ("(b, s, rest, size)", "(b, s, size, none)", "a size of 0 is stated", 1),
        ("s = Shape<start=1, end=2>(ids)", "s0 = Shape<start=1, end=2>(ids) s = Add(s0, s0)", "not that", 2),
        ("float[batch, seq, 12] x", "float[batch, other, 12] x", "size 1 is not that of axis 1", 1),
    ],
)
def test_any_other_shape_stays_with_its_reason(old, new, why, left):
    changed = model(SPLIT_AND_BACK.replace(old, new))
    result = ConstantShapesPass()(changed)
    assert why in str(result.skipped[0])
    assert ops(changed).count("Concat") == left


def test_a_second_time_changes_nothing():
    once = model()
    ConstantShapesPass()(once)
    text = str(once.graph)
    assert not ConstantShapesPass()(once).modified
    assert str(once.graph) == text
