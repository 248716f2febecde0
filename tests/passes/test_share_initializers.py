import numpy as np
import onnx_ir as ir
from pass_graphs import assert_same_results, text_model

from dsc.passes.share_initializers import ShareInitializersPass, share_between
from dsc.passes.verify_graph import verify_graph

A = np.arange(8, dtype=np.float32)


def build(b=A):
    return text_model(
        f"""agraph (float[batch, seq, 8] x, float[8] a, float[{"8" if b.ndim == 1 else "1, 8"}] b, float[8] c)
        => (float[batch, seq, 8] y) {{ s = Add(x, a) t = Mul(s, b) y = Add(t, c) }}""",
        a=A,
        b=b.copy(),
        c=A + 1,
    )


def test_equal_initializers_become_one():
    model = build()
    assert ShareInitializersPass()(model).fired == 1
    verify_graph(model)
    assert list(model.graph.initializers) == ["a", "c"]
    assert_same_results(build(), model, lambda b, s, r: {"x": r.standard_normal((b, s, 8)).astype(np.float32)})


def test_another_shape_or_type_is_another_initializer():
    assert not ShareInitializersPass()(build(A.reshape(1, 8))).modified


def test_graphs_share_tensors_by_content():
    target, draft = build(), build(A.reshape(1, 8))
    lazy = ir.LazyTensor(lambda: ir.tensor(A + 1), dtype=ir.DataType.FLOAT, shape=ir.Shape([8]))
    draft.graph.initializers["c"].const_value = lazy
    shared = share_between([target, draft])
    assert shared.n_shared == 4
    assert shared.nbytes_before == 6 * A.nbytes
    assert shared.nbytes_after == 2 * A.nbytes
    assert target.graph.initializers["a"].const_value is draft.graph.initializers["a"].const_value
    assert target.graph.initializers["c"].const_value is draft.graph.initializers["c"].const_value
    assert draft.graph.initializers["b"].const_value.shape == [1, 8]
    verify_graph(draft)
