import numpy as np
import onnx_ir as ir
import pytest
from attention_by_loops import attend, rotate_half
from pass_graphs import ops, run, session, text_model

from dsc.bundle_schema.errors import PassError
from dsc.passes.lower_attention import LowerAttentionPass
from dsc.passes.verify_graph import verify_graph

HQ, HKV, D, M = 6, 2, 16, 40
SCALE = D**-0.5


def attention_graph(attributes="", extra_inputs="", extra_values="", rotary="", norm=False):
    """q, k, v projections split into heads, optionally normalised and rotated, attended, merged again."""
    normed = "qt = RMSNormalization<axis=-1>(q0, g) kt = RMSNormalization<axis=-1>(k0, g)" if norm else ""
    if not norm:
        normed = "qt = Identity(q0) kt = Identity(k0)"
    return f"""agraph (int64[batch, seq] input_ids, int64[batch, seq] position_ids, int32[batch] past_lengths,
        float[batch, seq, {HQ * D}] q2, float[batch, seq, {HKV * D}] k2, float[batch, seq, {HKV * D}] v2,
        float[batch, {HKV}, max_rows, {D}] kp, float[batch, {HKV}, max_rows, {D}] vp,
        int64[4] qs, int64[4] ks, int64[3] os, float[{D}] g {extra_inputs})
      => (float[batch, seq, {HQ * D}] y, float[batch, {HKV}, max_rows, {D}] kpo,
          float[batch, {HKV}, max_rows, {D}] vpo)
      <float[batch, seq, {HQ * D}] qf, float[batch, {HQ}, seq, {D}] q0, float[batch, {HKV}, seq, {D}] k0,
       float[batch, {HQ}, seq, {D}] qt, float[batch, {HKV}, seq, {D}] kt,
       float[batch, {HQ}, seq, {D}] q, float[batch, {HKV}, seq, {D}] k, float[batch, {HQ}, seq, {D}] o,
       float[batch, {HKV}, seq, {D}] v>
      {{
        qr = Reshape(q2, qs) q0 = Transpose<perm=[0, 2, 1, 3]>(qr)
        kr = Reshape(k2, ks) k0 = Transpose<perm=[0, 2, 1, 3]>(kr)
        vr = Reshape(v2, ks) v = Transpose<perm=[0, 2, 1, 3]>(vr)
        {normed}
        {rotary or "q = Identity(qt) k = Identity(kt)"}
        o, kpo, vpo = ai.dspark.VerifyAttention<scale={SCALE} {attributes}>(
            q, k, v, kp, vp, past_lengths {extra_values})
        ot = Transpose<perm=[0, 2, 1, 3]>(o) y = Reshape(ot, os)
      }}"""


CONSTANTS = {
    "qs": np.array([0, 0, HQ, D]),
    "ks": np.array([0, 0, HKV, D]),
    "os": np.array([0, 0, HQ * D]),
    "g": np.random.default_rng(3).uniform(0.5, 1.5, D).astype(np.float32),
}
ROTARY = """
    pu = Unsqueeze(position_ids, axis) pf = Cast<to=1>(pu) angles = Mul(pf, inv_freq)
    c = Cos(angles) s = Sin(angles)
    q = RotaryEmbedding(qt, c, s) k = RotaryEmbedding(kt, c, s)"""
ROTARY_INPUTS = f", int64[1] axis, float[{D // 2}] inv_freq"
ROTARY_CONSTANTS = {
    "axis": np.array([2]),
    "inv_freq": (1e4 ** (-np.arange(D // 2) / (D // 2))).astype(np.float32),
}


def without_identities(model):
    from onnx_ir.passes.common import IdentityEliminationPass

    IdentityEliminationPass()(model)
    return model


def make_feeds(batch, seq, past, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    past = np.asarray(past, np.int32)
    return {
        "input_ids": np.zeros((batch, seq), np.int64),
        "position_ids": past[:, None].astype(np.int64) + np.arange(seq),
        "past_lengths": past,
        "q2": draw(batch, seq, HQ * D),
        "k2": draw(batch, seq, HKV * D),
        "v2": draw(batch, seq, HKV * D),
        "kp": draw(batch, HKV, M, D),
        "vp": draw(batch, HKV, M, D),
    }


def heads(flat, n):
    return flat.reshape(*flat.shape[:2], n, D).transpose(0, 2, 1, 3)


def expected(feeds, *, rotary=False, norm=False, **options):
    q, k, v = heads(feeds["q2"], HQ), heads(feeds["k2"], HKV), heads(feeds["v2"], HKV)
    if norm:
        q, k = (x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * CONSTANTS["g"] for x in (q, k))
    if rotary:
        angles = feeds["position_ids"][..., None] * ROTARY_CONSTANTS["inv_freq"]
        q, k = (rotate_half(x, np.cos(angles), np.sin(angles)) for x in (q, k))
    out, k_pool, v_pool = attend(q, k, v, feeds["kp"], feeds["vp"], feeds["past_lengths"], scale=SCALE, **options)
    return out.transpose(0, 2, 1, 3).reshape(*feeds["q2"].shape), k_pool, v_pool


def check(model, feeds, wanted):
    got = run(model, feeds)
    seq, past = feeds["q2"].shape[1], feeds["past_lengths"]
    np.testing.assert_allclose(got["y"], wanted[0], rtol=1e-5, atol=2e-6)
    for name, pool in (("kpo", wanted[1]), ("vpo", wanted[2])):
        for row, length in enumerate(past):
            used = slice(0, length + seq)
            np.testing.assert_allclose(got[name][row, :, used], pool[row, :, used], rtol=1e-5, atol=2e-6)


SHAPES = [
    (1, 1, [0]),
    (1, 4, [0]),
    (1, 1, [7]),
    (1, 4, [7]),
    (2, 1, [3, 9]),
    (3, 1, [0, 5, 20]),
    (2, 4, [0, 0]),
    (3, 4, [0] * 3),
]


@pytest.mark.parametrize(
    ("attributes", "options"),
    [
        ("", {}),
        (", window=5", {"window": 5}),
        (", window=1", {"window": 1}),
        (", softcap=2.0", {"softcap": 2.0}),
    ],
)
def test_plain_attention_becomes_one_node_on_the_flat_projections(attributes, options):
    model = without_identities(text_model(attention_graph(attributes), **CONSTANTS))
    result = LowerAttentionPass()(model)
    verify_graph(model)
    assert result.fired == 1
    assert ops(model)[-1] == "GroupQueryAttention"
    assert not {"Transpose", "Reshape"} & set(ops(model))
    assert [str(dim) for dim in model.graph.outputs[0].shape] == ["batch", "seq", str(HQ * D)]
    for batch, seq, past in SHAPES:
        feeds = make_feeds(batch, seq, past)
        check(model, feeds, expected(feeds, **options))


@pytest.mark.parametrize("fold", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_rotary_and_norms_stay_right(fold, norm):
    text = attention_graph(extra_inputs=ROTARY_INPUTS, rotary=ROTARY, norm=norm)
    model = without_identities(text_model(text, **CONSTANTS, **ROTARY_CONSTANTS))
    result = LowerAttentionPass(fold_rotary=fold, max_positions=64)(model)
    verify_graph(model)
    assert "Transpose" not in ops(model)
    assert ("RotaryEmbedding" in ops(model)) is not fold
    assert [reason.rule for reason in result.skipped] == ([] if fold else ["3"])
    for batch, seq, past in SHAPES:
        feeds = make_feeds(batch, seq, past)
        check(model, feeds, expected(feeds, rotary=True, norm=norm))


def test_tree_positions_reach_the_folded_rotary():
    text = attention_graph(extra_inputs=ROTARY_INPUTS, rotary=ROTARY)
    model = without_identities(text_model(text, **CONSTANTS, **ROTARY_CONSTANTS))
    LowerAttentionPass(fold_rotary=True, max_positions=64)(model)
    feeds = make_feeds(1, 4, [6])
    feeds["position_ids"] = np.array([[6, 7, 7, 8]])
    check(model, feeds, expected(feeds, rotary=True))


def test_frequencies_that_depend_on_the_length_keep_their_nodes():
    rotary = ROTARY.replace("Mul(pf, inv_freq)", "Mul(pf, scaled)").replace(
        "pu =", "scaled = Mul(inv_freq, stretch) pu =", 1
    )
    text = attention_graph(extra_inputs=ROTARY_INPUTS + ", float[1] stretch", rotary=rotary)
    model = without_identities(text_model(text, **CONSTANTS, **ROTARY_CONSTANTS))
    result = LowerAttentionPass(fold_rotary=True)(model)
    assert ops(model).count("RotaryEmbedding") == 2
    assert "not constant" in str(result.skipped[0])


def test_sinks():
    sinks = np.random.default_rng(1).standard_normal(HQ).astype(np.float32)
    text = attention_graph(extra_inputs=f", float[{HQ}] sinks", extra_values=", sinks")
    model = without_identities(text_model(text, **CONSTANTS, sinks=sinks))
    LowerAttentionPass()(model)
    verify_graph(model)
    for batch, seq, past in SHAPES:
        feeds = make_feeds(batch, seq, past)
        check(model, feeds, expected(feeds, sinks=sinks))


@pytest.mark.parametrize("past", [0, 9])
def test_tree_mask(past):
    text = attention_graph(extra_inputs=", bool[batch, 1, seq, seq] tree", extra_values=', "", tree')
    model = without_identities(text_model(text, **CONSTANTS))
    LowerAttentionPass()(model)
    verify_graph(model)
    tree = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)[None, None]
    feeds = make_feeds(1, 4, [past])
    check(model, feeds | {"tree": tree}, expected(feeds, tree_mask=tree))


def test_the_pool_is_updated_in_place_when_both_are_bound_to_one_buffer():
    model = without_identities(text_model(attention_graph(), **CONSTANTS))
    LowerAttentionPass()(model)
    feeds = make_feeds(1, 3, [5])
    wanted = expected(feeds)
    opened = session(model)
    binding = opened.io_binding()
    pools = {"kp": feeds.pop("kp"), "vp": feeds.pop("vp")}
    for name, array in feeds.items():
        binding.bind_cpu_input(name, array)
    for name, array in pools.items():
        binding.bind_input(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
        binding.bind_output(f"{name}o", "cpu", 0, np.float32, array.shape, array.ctypes.data)
    binding.bind_output("y")
    opened.run_with_iobinding(binding)
    np.testing.assert_allclose(pools["kp"], wanted[1], atol=1e-6)
    np.testing.assert_allclose(pools["vp"], wanted[2], atol=1e-6)


def test_an_output_read_in_its_split_form_is_split_again():
    text = attention_graph().replace(
        "ot = Transpose<perm=[0, 2, 1, 3]>(o) y = Reshape(ot, os)",
        "n = Neg(o) yt = Transpose<perm=[0, 2, 1, 3]>(n) y = Reshape(yt, os)",
    )
    model = without_identities(text_model(text, **CONSTANTS))
    LowerAttentionPass()(model)
    verify_graph(model)
    feeds = make_feeds(1, 4, [2])
    np.testing.assert_allclose(run(model, feeds)["y"], -expected(feeds)[0], atol=2e-6)


def test_heads_of_unknown_number_are_refused():
    model = text_model(attention_graph(), **CONSTANTS)
    node = next(node for node in model.graph if node.op_type == "VerifyAttention")
    node.inputs[0].shape = ir.Shape(["batch", "heads", "seq", D])
    with pytest.raises(PassError, match="both fixed"):
        LowerAttentionPass()(model)
