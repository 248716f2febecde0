import numpy as np
import onnx_ir as ir
import pytest
from native_operator import library
from pass_graphs import BATCHES_AND_LENGTHS, ops, run, text_model

from dsc.passes.attach_bodies import AttachBodiesPass
from dsc.passes.fuse_qkv_attention import FuseQkvAttentionPass
from dsc.passes.name_sanity import NameSanityPass
from dsc.passes.verify_graph import verify_graph

HQ, HKV, D, M = 6, 2, 16, 24
WIDE, NARROW = HQ * D, HKV * D
SPLIT = "q2, k2, v2 = Split<axis=-1>(qkv, sizes)"
SLICES = """q2 = Slice(qkv, at0, at1, last, one) k2 = Slice(qkv, at1, at2, last, one)
            v2 = Slice(qkv, at2, end, last, one)"""
ROTARY = "q = RotaryEmbedding(qt, cos, sin) k = RotaryEmbedding(kt, cos, sin)"
PARTIAL = """ql = Slice(qt, at0, part, last, one) qh = Slice(qt, part, end, last, one)
             kl = Slice(kt, at0, part, last, one) kh = Slice(kt, part, end, last, one)
             qr = RotaryEmbedding(ql, cos, sin) kr = RotaryEmbedding(kl, cos, sin)
             q = Concat<axis=-1>(qr, qh) k = Concat<axis=-1>(kr, kh)"""
NORMED = """qn = RMSNormalization<axis=-1>(qt, g) kn = RMSNormalization<axis=-1>(kt, g)
            q = RotaryEmbedding(qn, cos, sin) k = RotaryEmbedding(kn, cos, sin)"""
CONSTANTS = {
    "sizes": np.array([WIDE, NARROW, NARROW]),
    "at0": np.array([0]),
    "at1": np.array([WIDE]),
    "at2": np.array([WIDE + NARROW]),
    "end": np.array([1 << 40]),
    "part": np.array([D // 2]),
    "last": np.array([-1]),
    "one": np.array([1]),
    "qs": np.array([0, 0, HQ, D]),
    "ks": np.array([0, 0, HKV, D]),
    "os": np.array([0, 0, WIDE]),
    "g": np.random.default_rng(3).uniform(0.5, 1.5, D).astype(np.float32),
    "sinks": np.random.default_rng(4).standard_normal(HQ).astype(np.float32),
}


def attention(cut=SPLIT, rotary=ROTARY, attributes="", optional="", turned=D // 2):
    """A packed projection, cut, split into heads, turned and attended to."""
    kinds = {np.dtype(np.int64): "int64", np.dtype(np.float32): "float"}
    constants = ", ".join(f"{kinds[a.dtype]}[{a.size}] {name}" for name, a in CONSTANTS.items())
    pool = f"float[batch, {HKV}, max_rows, {D}]"
    return text_model(
        f"""agraph (float[batch, seq, {WIDE + 2 * NARROW}] qkv, float[batch, seq, {turned}] cos,
            float[batch, seq, {turned}] sin, {pool} kp, {pool} vp, int32[batch] past,
            bool[batch, 1, seq, seq] tree, {constants})
          => (float[batch, seq, {WIDE}] y, {pool} kpo, {pool} vpo)
          <float[batch, seq, {WIDE}] q2, float[batch, seq, {NARROW}] k2, float[batch, seq, {NARROW}] v2,
           float[batch, {HQ}, seq, {D}] qt, float[batch, {HKV}, seq, {D}] kt, float[batch, {HKV}, seq, {D}] v,
           float[batch, {HQ}, seq, {turned * 2}] ql, float[batch, {HKV}, seq, {turned * 2}] kl,
           float[batch, {HQ}, seq, {D}] q, float[batch, {HKV}, seq, {D}] k, float[batch, {HQ}, seq, {D}] o>
          {{ {cut}
            q4 = Reshape(q2, qs) qt = Transpose<perm=[0, 2, 1, 3]>(q4)
            k4 = Reshape(k2, ks) kt = Transpose<perm=[0, 2, 1, 3]>(k4)
            v4 = Reshape(v2, ks) v = Transpose<perm=[0, 2, 1, 3]>(v4) {rotary}
            o, kpo, vpo = ai.dspark.VerifyAttention<scale=0.2 {attributes}>(q, k, v, kp, vp, past {optional})
            ot = Transpose<perm=[0, 2, 1, 3]>(o) y = Reshape(ot, os) }}""",
        **CONSTANTS,
    )


def feeds(batch, seq, turned, pasts=(5, 0, 9)):
    rng = np.random.default_rng(batch)
    angles = rng.uniform(0, 6, (batch, seq, turned))
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return {
        "qkv": draw(batch, seq, WIDE + 2 * NARROW),
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
        "kp": draw(batch, HKV, M, D),
        "vp": draw(batch, HKV, M, D),
        "past": np.array(pasts[:batch], np.int32),
        "tree": np.tril(rng.integers(0, 2, (batch, 1, seq, seq)), -1).astype(bool) | np.eye(seq, dtype=bool),
    }


def assert_fused_alike(reference, turned=D // 2):
    """The fused graph computes what `reference` does, by function bodies and by the native library."""
    fused = reference.clone()
    assert FuseQkvAttentionPass()(fused).fired == 1
    for model in (reference, fused):
        AttachBodiesPass()(model)
        NameSanityPass()(model)
        verify_graph(model)
    assert ops(fused) == ["QkvAttention"]
    names = [value.name for value in fused.graph.inputs]
    for batch, seq in BATCHES_AND_LENGTHS:
        given = {name: array for name, array in feeds(batch, seq, turned).items() if name in names}
        wanted = run(reference, given)
        for native in (None, library()):
            got = run(fused, given, library=native)
            for name, array in wanted.items():
                np.testing.assert_allclose(got[name], array, rtol=1e-4, atol=1e-5, err_msg=f"{name} {batch} {seq}")


@pytest.mark.parametrize("cut", [SPLIT, SLICES], ids=["split", "slices"])
@pytest.mark.parametrize(
    ("attributes", "optional"),
    [("", ""), (", window=3", ""), (", softcap=2.0", ", sinks"), ("", ', "", tree'), (", window=4", ", sinks, tree")],
    ids=["plain", "window", "softcap and sinks", "tree", "all"],
)
def test_every_form_of_attention(cut, attributes, optional):
    assert_fused_alike(attention(cut, attributes=attributes, optional=optional))


def test_a_partial_rotary_embedding():
    assert_fused_alike(attention(rotary=PARTIAL, turned=D // 4), turned=D // 4)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"rotary": NORMED}, "RMSNormalization stands between"),
        ({"rotary": "q = Identity(qt) k = Identity(kt)"}, "Identity stands between"),
        ({"rotary": ROTARY.replace("(qt", "<interleaved=1>(qt")}, "RotaryEmbedding stands between"),
        ({"rotary": ROTARY.replace("RotaryEmbedding(kt, cos, sin)", "RotaryEmbedding(kt, sin, cos)")}, "different"),
        ({"cut": SPLIT.replace("q2, k2, v2", "q2, v2, k2")}, "in this order"),
        ({"cut": SLICES.replace("at1, at2", "at2, end")}, "in this order"),
        ({"cut": f"n = Neg(qkv) {SLICES.replace('v2 = Slice(qkv', 'v2 = Slice(n')}"}, "in this order"),
        ({"rotary": PARTIAL.replace("Concat<axis=-1>(qr, qh)", "Concat<axis=-1>(qh, qr)"), "turned": 4}, "Concat"),
        ({"rotary": PARTIAL.replace("Slice(qt, part, end", "Slice(qt, at0, part"), "turned": 4}, "Concat"),
    ],
)
def test_what_the_operator_cannot_do_is_left_with_its_reason(changed, why):
    model = attention(**changed)
    result = FuseQkvAttentionPass()(model)
    assert not result.modified
    assert why in str(result.skipped[0])
    assert "VerifyAttention" in ops(model)


def test_attention_without_positions_is_left():
    model = attention(rotary="")
    node = next(node for node in model.graph if node.op_type == "VerifyAttention")
    turned = {node.op_type: node for node in model.graph}
    assert "RotaryEmbedding" not in turned
    heads = {out.name: out for step in model.graph for out in step.outputs}
    node.replace_input_with(0, heads["qt"])
    node.replace_input_with(1, heads["kt"])
    assert "no rotary embedding" in str(FuseQkvAttentionPass()(model).skipped[0])


def test_half_precision_is_left():
    model = attention()
    next(v for v in model.graph.inputs if v.name == "qkv").type = ir.TensorType(ir.DataType.FLOAT16)
    assert "float32" in str(FuseQkvAttentionPass()(model).skipped[0])
