import numpy as np
import pytest
from pass_graphs import ops, run, text_model

from dsc.passes.to_float16 import ToFloat16Pass
from dsc.passes.verify_graph import verify_graph

RNG = np.random.default_rng(0)
E = RNG.standard_normal((20, 32)).astype(np.float32)
W = (RNG.standard_normal((32, 32)) / 6).astype(np.float32)
G = RNG.uniform(0.5, 1.5, 32).astype(np.float32)
TEXT = """agraph (int64[batch, seq] ids, float[batch, seq, 32] x, float[20, 32] e, float[32, 32] w, float[32] g,
  float two) => (float[batch, seq, 20] logits, float[batch, seq, 32] tap)
<float[batch, seq, 32] h, float[batch, seq, 32] s, float[batch, seq, 32] n, float[batch, seq, 32] m>
{ h = Gather(e, ids) s = Add(h, x) n = RMSNormalization<axis=-1, epsilon=1e-6>(s, g) m = MatMul(n, w) tap = Add(s, m)
  logits = com.microsoft.FusedMatMul<transB=1>(tap, e) }"""


def build():
    return text_model(TEXT, e=E, w=W, g=G, two=np.array(2, np.float32))


def half(feeds):
    return {name: a.astype(np.float16) if a.dtype == np.float32 else a for name, a in feeds.items()}


@pytest.mark.parametrize("scale", [1, 300])
def test_parity_also_on_large_activations(scale):
    model = build()
    result = ToFloat16Pass()(model)
    verify_graph(model)
    assert [reason.rule for reason in result.skipped] == ["2"]
    for batch, seq in ((1, 1), (2, 4), (3, 1)):
        rng = np.random.default_rng(batch)
        x = (scale * rng.standard_normal((batch, seq, 32))).astype(np.float32)
        feeds = {"ids": rng.integers(0, 20, (batch, seq)), "x": x}
        wanted, got = run(build(), feeds), run(model, half(feeds))
        for name in ("logits", "tap"):
            assert got[name].dtype == np.float32
            limit = 4e-3 * np.abs(wanted[name]).max()
            np.testing.assert_allclose(got[name], wanted[name], atol=limit)


def test_what_is_converted_and_what_stays():
    model = build()
    ToFloat16Pass()(model)
    types = {name: value.dtype.name for name, value in model.graph.initializers.items()}
    assert types == {"e": "FLOAT16", "w": "FLOAT16", "g": "FLOAT", "two": "FLOAT"}
    norm = next(node for node in model.graph if node.op_type == "RMSNormalization")
    assert norm.outputs[0].dtype.name == "FLOAT"
    assert [value.dtype.name for value in model.graph.inputs] == ["INT64", "FLOAT16"]
    assert ops(model).count("Cast") == 4


def test_angles_stay_exact_and_are_rounded_last():
    model = text_model(
        """agraph (int64[batch, seq] positions, float[batch, 2, seq, 8] q, float[4] f, int64[1] axis)
        => (float[batch, 2, seq, 8] k_pool_out.0)
        <float[batch, seq, 1] p, float[batch, seq, 4] a, float[batch, seq, 4] c, float[batch, seq, 4] s>
        { u = Unsqueeze(positions, axis) p = Cast<to=1>(u) a = Mul(p, f) c = Cos(a) s = Sin(a)
          k_pool_out.0 = RotaryEmbedding(q, c, s) }""".replace("k_pool_out.0", "kout"),
        f=np.array([1, 0.1, 0.01, 0.001], np.float32),
        axis=np.array([2]),
    )
    model.graph.outputs[0].name = "k_pool_out.0"
    ToFloat16Pass()(model)
    verify_graph(model)
    assert model.graph.outputs[0].dtype.name == "FLOAT16"
    positions = np.array([[4097, 8191]])
    q = RNG.standard_normal((1, 2, 2, 8)).astype(np.float16)
    got = run(model, {"positions": positions, "q": q})["k_pool_out.0"].astype(np.float32)
    angles = positions[..., None] * np.array([1, 0.1, 0.01, 0.001])
    c, s = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = q[..., :4].astype(np.float32), q[..., 4:].astype(np.float32)
    np.testing.assert_allclose(got, np.concatenate([a * c - b * s, b * c + a * s], -1), atol=4e-3)


def test_attention_sinks_stay_float32():
    model = text_model(
        """agraph (float[1, 2, seq, 8] q, float[1, 2, max, 8] kp, float[1, 2, max, 8] vp, int32[1] past, float[2] sinks)
        => (float[1, 2, seq, 8] tap, float[1, 2, max, 8] ko, float[1, 2, max, 8] vo) <float[1, 2, seq, 8] o>
        { o, ko, vo = ai.dspark.VerifyAttention(q, q, q, kp, vp, past, sinks) tap = Identity(o) }""",
        sinks=np.ones(2, np.float32),
    )
    ToFloat16Pass()(model)
    types = [value.dtype.name for value in next(iter(model.graph)).inputs]
    assert types == ["FLOAT16"] * 5 + ["INT32", "FLOAT"]


def test_a_weight_that_float32_needs_too_is_converted_beside_it():
    model = text_model(
        """agraph (float[batch, 32] x, float[32, 32] w) => (float[batch, 32] tap, float[32, 32] e)
        <float[batch, 32] m> { m = MatMul(x, w) tap = Relu(m) e = Exp(w) }""",
        w=W,
    )
    ToFloat16Pass()(model)
    verify_graph(model)
    assert set(model.graph.initializers) == {"w", "w.float16"}


WRITTEN_OUT = {
    "mean of squares": "q = Pow(x, two) m = ReduceMean<keepdims=1>(q, last) e = Add(m, eps) r = Sqrt(e) n = Div(x, r)",
    "mean of products": "q = Mul(x, x) m = ReduceMean<keepdims=1>(q, last) e = Add(m, eps) r = Sqrt(e)"
    " i = Reciprocal(r) n = Mul(i, x)",
    "length": "r = ReduceL2<keepdims=1>(x, last) n = Div(x, r)",
    "sum of squares": "q = ReduceSumSquare<keepdims=1>(x, last) r = Sqrt(q) n = Div(x, r)",
    "sum of products": "q = Mul(x, x) s = ReduceSum<keepdims=1>(q, last) r = Sqrt(s) n = Div(x, r)",
    "lp": "n = LpNormalization<axis=-1>(x)",
    "layer norm": "n = LayerNormalization<axis=-1, epsilon=1e-6>(x, g)",
    "centred": "a = ReduceMean<keepdims=1>(x, last) d = Sub(x, a) q = Mul(d, d) m = ReduceMean<keepdims=1>(q, last)"
    " e = Add(m, eps) r = Sqrt(e) n = Div(d, r)",
    "with a skip": "n = com.microsoft.SkipLayerNormalization<epsilon=1e-6>(x, x, g)",
}
"""Normalisations as exporters write them: their sums are past what 16 bits hold long before their results are."""


@pytest.mark.parametrize("body", WRITTEN_OUT.values(), ids=WRITTEN_OUT)
@pytest.mark.parametrize("scale", [1, 300, 6000])
def test_norms_in_any_spelling_are_right_on_large_activations(body, scale):
    text = f"""agraph (float[batch, seq, 256] x, float[256, 16] w, float[256] g, int64[1] last, float two, float eps)
      => (float[batch, seq, 16] logits) {{ {body} logits = MatMul(n, w) }}"""
    rng = np.random.default_rng(2)
    given = {"w": rng.standard_normal((256, 16)).astype(np.float32) / 16, "g": np.ones(256, np.float32)}
    given |= {"last": np.array([-1]), "two": np.array(2, np.float32), "eps": np.array(1e-6, np.float32)}
    plain, model = text_model(text, **given), text_model(text, **given)
    ToFloat16Pass()(model)
    verify_graph(model)
    x = (scale * rng.standard_normal((2, 3, 256))).astype(np.float32)
    wanted, got = run(plain, {"x": x})["logits"], run(model, half({"x": x}))["logits"]
    assert np.abs(got - wanted).max() < 4e-3 * np.ptp(wanted)
