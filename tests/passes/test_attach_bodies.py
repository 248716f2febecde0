import numpy as np
import pytest
from pass_graphs import ops, run, text_model

from dsc.bundle_schema.errors import PassError
from dsc.kernels.block_matmul import BLOCK_MATMUL
from dsc.passes.attach_bodies import BODIES, AttachBodiesPass
from dsc.passes.lower_attention import LowerAttentionPass
from dsc.passes.name_sanity import NameSanityPass
from dsc.passes.verify_graph import verify_graph

SCALE = 0.25
ATTENTION = """agraph (int64[B, S] input_ids, float[B, 4, S, 16] q, float[B, 2, S, 16] k, float[B, 2, S, 16] v,
  float[B, 2, M, 16] kp, float[B, 2, M, 16] vp, int32[B] past, float[4] sinks)
=> (float[B, 4, S, 16] o, float[B, 2, M, 16] kpo, float[B, 2, M, 16] vpo)
{ o, kpo, vpo = ai.dspark.VerifyAttention<scale=0.25>(q, k, v, kp, vp, past EXTRA) }"""


@pytest.mark.parametrize("extra", ["", ", sinks"])
def test_body_and_lowering_of_attention_agree(extra):
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    text, sinks = ATTENTION.replace("EXTRA", extra), draw(4)
    body, lowered = text_model(text, sinks=sinks), text_model(text, sinks=sinks)
    assert AttachBodiesPass()(body).fired == 1
    NameSanityPass()(body)
    LowerAttentionPass()(lowered)
    verify_graph(body)
    assert ops(body) == ["VerifyAttention"]
    for batch, seq, past in ((1, 4, [5]), (1, 1, [0]), (3, 1, [2, 0, 7])):
        feeds = {
            "input_ids": np.zeros((batch, seq), np.int64),
            "q": draw(batch, 4, seq, 16),
            "k": draw(batch, 2, seq, 16),
            "v": draw(batch, 2, seq, 16),
            "kp": draw(batch, 2, 16, 16),
            "vp": draw(batch, 2, 16, 16),
            "past": np.array(past, np.int32),
        }
        one, other = run(body, feeds), run(lowered, feeds)
        np.testing.assert_allclose(one["o"], other["o"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mins", [False, True])
def test_two_forms_of_one_operator_get_two_bodies(mins):
    inputs = BLOCK_MATMUL.make_inputs(BLOCK_MATMUL.example, 0)
    n, k = inputs["scales"].shape[0], inputs["x"].shape[-1]
    bits = 8 * inputs["qweight"].shape[2] // 32
    node = f"ai.dspark.BlockMatMul<K={k}, N={n}, bits={bits}, block=32>"
    text = f"""agraph (float[S, {k}] x, uint8[{n}, {k // 32}, {bits * 4}] q,
      float[{n}, {k // 32}] s, float[{n}, {k // 32}] m) => (float[S, {n}] y, float[S, {n}] z, float[S, {n}] t)
    {{ y = {node}(x, q, s) t = {node}(x, q, s) z = {node}(x, q, s, m) }}"""
    weights = {"q": inputs["qweight"], "s": inputs["scales"], "m": inputs["mins"]}
    model = text_model(text, **weights)
    assert AttachBodiesPass()(model).fired == 2
    assert len({node.overload for node in model.graph}) == 2
    verify_graph(model)
    got = run(model, {"x": inputs["x"].reshape(-1, k)})
    attributes = {"bits": bits, "K": k, "N": n, "block": 32}
    given = inputs if mins else {name: a for name, a in inputs.items() if name != "mins"}
    wanted = BLOCK_MATMUL.reference(given, attributes)["y"].reshape(-1, n)
    assert np.abs(got["z" if mins else "y"] - wanted).max() < 0.02 * np.abs(wanted).max()
    np.testing.assert_array_equal(got["y"], got["t"])
    assert not AttachBodiesPass()(model).modified


def test_an_operator_without_a_body_is_named():
    with pytest.raises(PassError, match=r"ai\.dspark::Twice: has no function body.*BlockMatMul"):
        AttachBodiesPass()(text_model("agraph (float[B, 4] x) => (float[B, 4] y) { y = ai.dspark.Twice(x) }"))


def test_a_graph_of_standard_operators_needs_nothing():
    assert not AttachBodiesPass()(text_model("agraph (float[B] x) => (float[B] y) { y = Relu(x) }")).modified
    assert {"BlockMatMul", "Experts", "QkvAttention", "SwiGlu", "VerifyAttention"} <= set(BODIES)
