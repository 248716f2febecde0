import tracemalloc

import numpy as np
import onnx_ir as ir
from pass_graphs import assert_same_results, ops, text_model

from dsc.passes.fold_constants import FoldConstantsPass
from dsc.passes.verify_graph import verify_graph

RNG = np.random.default_rng(0)
W = RNG.standard_normal((5, 8)).astype(np.float32)


def feeds(batch, seq, rng):
    return {
        "x": rng.standard_normal((batch, seq, 8)).astype(np.float32),
        "ids": rng.integers(0, 5, (batch, seq)),
    }


def untied():
    return text_model(
        """agraph (float[batch, seq, 8] x, float[5, 8] w) => (float[batch, seq, 5] y, float[batch, seq, 5] z)
        { t = Transpose<perm=[1, 0]>(w) y = MatMul(x, t)
          u = Transpose<perm=[1, 0]>(w) n = Neg(x) z = MatMul(n, u) }""",
        w=W,
    )


def tied():
    return text_model(
        """agraph (int64[batch, seq] ids, float[5, 8] w) => (float[batch, seq, 5] y)
        { e = Gather(w, ids) t = Transpose<perm=[1, 0]>(w) y = MatMul(e, t) }""",
        w=W,
    )


def test_a_weight_is_stored_transposed_and_only_when_it_is_read():
    model = untied()
    result = FoldConstantsPass()(model)
    verify_graph(model)
    assert result.fired == 1
    assert "Transpose" not in ops(model)
    tensor = model.graph.initializers["w"].const_value
    assert isinstance(tensor, ir.LazyTensor)
    assert not tensor.cache
    np.testing.assert_array_equal(tensor.numpy(), W.T)
    assert_same_results(untied(), model, lambda b, s, r: {"x": feeds(b, s, r)["x"]})


def test_a_tied_weight_stays_the_only_copy():
    model = tied()
    result = FoldConstantsPass()(model)
    verify_graph(model)
    assert ops(model) == ["Gather", "FusedMatMul"]
    assert sum(v.const_value.nbytes for v in model.graph.initializers.values()) == W.nbytes
    assert "other nodes read" in str(result.skipped[0])
    assert_same_results(tied(), model, lambda b, s, r: {"ids": feeds(b, s, r)["ids"]})


def test_constant_expressions_become_initializers():
    def build():
        return text_model(
            """agraph (float[batch, seq, 8] x, float[8] a) => (float[batch, seq, 8] y)
            { two = Constant<value_float=2.0>() b = Mul(a, two) c = Exp(b) y = Mul(x, c) }""",
            a=W[0],
        )

    model = build()
    result = FoldConstantsPass()(model)
    verify_graph(model)
    assert ops(model) == ["Mul"]
    assert result.fired >= 2
    assert_same_results(build(), model, lambda b, s, r: {"x": feeds(b, s, r)["x"]})


def test_large_constants_are_not_computed():
    model = text_model(
        "agraph (float[B, 8] x, float[8, 8] w) => (float[B, 8] y) { n = Neg(w) y = MatMul(x, n) }",
        w=np.eye(8, dtype=np.float32),
    )
    assert not FoldConstantsPass(max_elements=32)(model).modified
    assert ops(model) == ["Neg", "MatMul"]


def test_nothing_to_do_changes_nothing():
    model = text_model("agraph (float[B, 8] x) => (float[B, 8] y) { y = Relu(x) }")
    assert not FoldConstantsPass()(model).modified


def test_memory_never_holds_more_than_one_transposed_tensor():
    big = {f"w{i}": RNG.standard_normal((512, 512)).astype(np.float32) for i in range(6)}
    shapes = ", ".join(f"float[512, 512] {name}" for name in big)
    body = " ".join(f"t{n} = Transpose<perm=[1, 0]>({n}) y{i} = MatMul(x, t{n})" for i, n in enumerate(big))
    outputs = ", ".join(f"float[S, 512] y{i}" for i in range(len(big)))
    model = text_model(f"agraph (float[S, 512] x, {shapes}) => ({outputs}) {{ {body} }}", **big)
    one = big["w0"].nbytes
    tracemalloc.start()
    try:
        assert FoldConstantsPass()(model).fired == len(big)
        assert tracemalloc.get_traced_memory()[1] < one
        tracemalloc.reset_peak()
        for value in model.graph.initializers.values():
            assert len(value.const_value.tobytes()) == one
        assert tracemalloc.get_traced_memory()[1] < 3.5 * one
    finally:
        tracemalloc.stop()
