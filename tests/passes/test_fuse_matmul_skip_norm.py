import numpy as np
import onnx_ir as ir
import pytest
from native_operator import library
from pass_graphs import assert_same_results, ops, run, text_model

from dsc.passes.attach_bodies import AttachBodiesPass
from dsc.passes.fuse_dense_matmul import FuseDenseMatMulPass
from dsc.passes.fuse_matmul_skip_norm import FuseMatMulSkipNormPass
from dsc.passes.verify_graph import verify_graph

RNG = np.random.default_rng(0)
WEIGHTS = {
    "w": RNG.standard_normal((8, 8)).astype(np.float32),
    "v": RNG.standard_normal((8, 8)).astype(np.float32),
    "g": RNG.uniform(0.5, 2, 8).astype(np.float32),
}
PRODUCT = "p = com.microsoft.FusedMatMul<transB=1>(x, w)"
NORM = """n, none, nothing, s = com.microsoft.SkipSimplifiedLayerNormalization<epsilon=0.01>(x, p, g)
y = com.microsoft.FusedMatMul<transB=1>(n, v)"""


def feeds(batch, seq, rng):
    return {"x": rng.standard_normal((batch, seq, 8)).astype(np.float32)}


def layer(body, outputs="float[batch, seq, 8] y, float[batch, seq, 8] z"):
    model = text_model(
        f"""agraph (float[batch, seq, 8] x, float[8, 8] w, float[8, 8] v, float[8] g) => ({outputs}) {{ {body} }}""",
        **WEIGHTS,
    )
    norm = next(node for node in model.graph if node.op_type == "SkipSimplifiedLayerNormalization")
    for unused in norm.outputs[1:3]:
        unused.name = ""
    for term in norm.inputs[:2]:
        term.shape = model.graph.inputs[0].shape  # onnx does not infer that of a contributed operator
    FuseDenseMatMulPass()(model)
    return model


@pytest.mark.parametrize("terms", ["x, p", "p, x"])
def test_body_and_library_compute_what_the_nodes_do(terms):
    body = f"{PRODUCT} {NORM} z = Neg(s)".replace("(x, p, g)", f"({terms}, g)")
    plain, model = layer(body), layer(body)
    assert FuseMatMulSkipNormPass()(model).fired == 1
    for each in (plain, model):
        AttachBodiesPass()(each)
    verify_graph(model)
    assert ops(model) == ["DenseMatMulSkipNorm", "DenseMatMul", "Neg"]
    assert_same_results(plain, model, feeds)
    given = feeds(2, 3, np.random.default_rng(1))
    wanted, found = run(plain, given), run(model, given, library=library())
    for name in ("y", "z"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5, atol=1e-5)


def test_a_sum_that_nothing_else_reads_needs_no_reader():
    model = layer(f"{PRODUCT} {NORM}", "float[batch, seq, 8] y")
    assert FuseMatMulSkipNormPass()(model).fired == 1
    AttachBodiesPass()(model)
    assert run(model, feeds(1, 2, RNG), library=library())["y"].shape == (1, 2, 8)


@pytest.mark.parametrize("other", ["z = Neg(p)", "z = Identity(p)"])
def test_a_product_that_something_else_reads_stays(other):
    result = FuseMatMulSkipNormPass()(layer(f"{PRODUCT} {NORM} {other}"))
    assert result.fired == 0
    assert "nothing else reads" in str(result.skipped[0])


def test_a_product_that_is_an_output_stays():
    model = layer(f"{PRODUCT} {NORM}", "float[batch, seq, 8] y, float[batch, seq, 8] p")
    assert FuseMatMulSkipNormPass()(model).fired == 0


def test_products_of_onnxruntime_and_biased_sums_stay():
    body = f"{PRODUCT} {NORM} z = Neg(s)"
    bare = text_model(
        "agraph (float[b, s1, 8] x, float[8, 8] w, float[8] g) => (float[b, s1, 8] n) "
        "{ p = MatMul(x, w) n = com.microsoft.SkipSimplifiedLayerNormalization(x, p, g) }",
        w=WEIGHTS["w"], g=WEIGHTS["g"],
    )  # fmt: skip
    assert "no term is a native product" in str(FuseMatMulSkipNormPass()(bare).skipped[0])
    biased = layer(body)
    norm = next(node for node in biased.graph if node.op_type == "SkipSimplifiedLayerNormalization")
    norm.resize_inputs(4)
    norm.replace_input_with(3, norm.inputs[2])
    assert "a bias" in str(FuseMatMulSkipNormPass()(biased).skipped[0])


def test_more_outputs_and_unequal_terms_stay():
    more = layer(f"{PRODUCT} {NORM} z = Neg(s)")
    norm = next(node for node in more.graph if node.op_type == "SkipSimplifiedLayerNormalization")
    norm.outputs[1].name = "mean"
    more.graph.outputs.append(norm.outputs[1])
    assert "more than its result" in str(FuseMatMulSkipNormPass()(more).skipped[0])
    unequal = layer(f"{PRODUCT} {NORM} z = Neg(s)")
    norm = next(node for node in unequal.graph if node.op_type == "SkipSimplifiedLayerNormalization")
    norm.inputs[0].shape = ir.Shape([8])
    assert "the terms have the shapes" in str(FuseMatMulSkipNormPass()(unequal).skipped[0])
