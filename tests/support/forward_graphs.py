"""A tiny tied decoder as the exporter writes it: two layers, grouped heads, rotary, gated feed-forward."""

from __future__ import annotations

import numpy as np
from pass_graphs import text_model

N_LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, POOL = 2, 64, 4, 2, 16, 96, 80, 32


def forward_graph(seed=0, window=-1):
    """The graph before any pass; weights by the checkpoint's names, with ``.`` in them.

    The first layer sees a window only; -1: all.
    """
    rng = np.random.default_rng(seed)
    weights = {
        "model.embed": rng.standard_normal((VOCAB, HIDDEN)),
        "model.norm": rng.uniform(0.5, 1.5, HIDDEN),
        "model.inv_freq": 1e4 ** -(np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2)),
    }
    body = [
        "e = Gather(`model.embed`, input_ids) h0 = Identity(e)",
        "pu = Unsqueeze(position_ids, axis2) pf = Cast<to=1>(pu) angles = Mul(pf, `model.inv_freq`)",
    ]
    for layer in range(N_LAYERS):
        weights |= {f"layer{layer}.{name}": array for name, array in _layer_weights(rng).items()}
        body.append(_layer_text(layer))
    body.append(
        f"n = RMSNormalization<axis=-1>(h{N_LAYERS}, `model.norm`) s = Gather<axis=1>(n, logit_rows)"
        " ht = Transpose<perm=[1, 0]>(`model.embed`) logits = MatMul(s, ht)"
    )
    constants = {
        "axis2": np.array([2]),
        "split_q": np.array([0, 0, HEADS, HEAD_DIM]),
        "split_kv": np.array([0, 0, KV_HEADS, HEAD_DIM]),
        "merge": np.array([0, 0, HEADS * HEAD_DIM]),
    }
    arrays = {name: np.asarray(a, np.float32) for name, a in weights.items()} | constants
    text = _build(arrays, "\n".join(body)).replace("window=-1", f"window={window}", 1)
    return _named(text, arrays)


def step_feeds(past, seq, dtype=np.float32, batch=1):
    """Inputs of one step whose logits are all wanted; the pools start empty."""
    rng = np.random.default_rng(past)
    feeds = {
        "input_ids": rng.integers(0, VOCAB, (batch, seq)),
        "position_ids": np.tile(past + np.arange(seq), (batch, 1)),
        "logit_rows": np.arange(seq),
        "past_lengths": np.full(batch, past, np.int32),
    }
    for layer in range(N_LAYERS):
        for role in "kv":
            feeds[f"{role}_pool.{layer}"] = np.zeros((batch, KV_HEADS, POOL, HEAD_DIM), dtype)
    return feeds


def _layer_weights(rng):
    shapes = {
        "q": (HEADS * HEAD_DIM, HIDDEN),
        "k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "o": (HIDDEN, HEADS * HEAD_DIM),
        "gate": (INNER, HIDDEN),
        "up": (INNER, HIDDEN),
        "down": (HIDDEN, INNER),
    }
    made = {name: rng.standard_normal(shape) / np.sqrt(shape[1]) for name, shape in shapes.items()}
    # Attention that looks at few keys, layers that outweigh the embedding: the output is what was read, and varied.
    made |= {name: gain * made[name] for name, gain in (("q", 4), ("o", 8), ("down", 4))}
    return made | {"n1": rng.uniform(0.5, 1.5, HIDDEN), "n2": rng.uniform(0.5, 1.5, HIDDEN)}


def _layer_text(i):
    w = f"layer{i}."

    def product(out, x, name):
        return f"{out}_t{i} = Transpose<perm=[1, 0]>(`{w}{name}`) {out}{i} = MatMul({x}, {out}_t{i})"

    return f"""
    a{i} = RMSNormalization<axis=-1>(h{i}, `{w}n1`)
    {product("q2_", f"a{i}", "q")} {product("k2_", f"a{i}", "k")} {product("v2_", f"a{i}", "v")}
    qr{i} = Reshape(q2_{i}, split_q) qt{i} = Transpose<perm=[0, 2, 1, 3]>(qr{i})
    kr{i} = Reshape(k2_{i}, split_kv) kt{i} = Transpose<perm=[0, 2, 1, 3]>(kr{i})
    vr{i} = Reshape(v2_{i}, split_kv) vt{i} = Transpose<perm=[0, 2, 1, 3]>(vr{i})
    c{i} = Cos(angles) s{i} = Sin(angles)
    qq{i} = RotaryEmbedding(qt{i}, c{i}, s{i}) kk{i} = RotaryEmbedding(kt{i}, c{i}, s{i})
    o{i}, `k_pool_out.{i}`, `v_pool_out.{i}` = ai.dspark.VerifyAttention<scale=0.25, window=-1, softcap=0.0>(
      qq{i}, kk{i}, vt{i}, `k_pool.{i}`, `v_pool.{i}`, past_lengths)
    ot{i} = Transpose<perm=[0, 2, 1, 3]>(o{i}) of{i} = Reshape(ot{i}, merge)
    {product("oo_", f"of{i}", "o")} m{i} = Add(h{i}, oo_{i}) b{i} = RMSNormalization<axis=-1>(m{i}, `{w}n2`)
    {product("g_", f"b{i}", "gate")} {product("u_", f"b{i}", "up")}
    sg{i} = Sigmoid(g_{i}) si{i} = Mul(g_{i}, sg{i}) f{i} = Mul(si{i}, u_{i})
    {product("d_", f"f{i}", "down")} h{i + 1} = Add(m{i}, d_{i})"""


def _shape_notes():
    """Types of inner values, as an exporter writes them."""
    notes = []
    for i in range(N_LAYERS):
        wide = {f"{name}{i}": HIDDEN for name in ("h", "a", "oo_", "m", "b", "d_", "of")}
        wide |= {f"{name}{i}": INNER for name in ("g_", "u_", "sg", "si", "f")}
        wide |= {f"q2_{i}": HEADS * HEAD_DIM, f"k2_{i}": KV_HEADS * HEAD_DIM, f"v2_{i}": KV_HEADS * HEAD_DIM}
        notes += [f"float[batch, seq, {width}] {name}" for name, width in wide.items()]
        split = {"qt": HEADS, "qq": HEADS, "o": HEADS, "kt": KV_HEADS, "kk": KV_HEADS, "vt": KV_HEADS}
        notes += [f"float[batch, {n}, seq, {HEAD_DIM}] {name}{i}" for name, n in split.items()]
    notes += [f"float[batch, seq, {HIDDEN}] {name}" for name in ("e", f"h{N_LAYERS}", "n")]
    return [*notes, f"float[batch, rows, {HIDDEN}] s"]


def _build(arrays, body):
    pools = [f"{role}_pool.{i}" for i in range(N_LAYERS) for role in "kv"]
    pool = f"float[batch, {KV_HEADS}, max_rows, {HEAD_DIM}]"
    kinds = {name: "int64" if a.dtype == np.int64 else "float" for name, a in arrays.items()}
    inputs = [
        "int64[batch, seq] input_ids",
        "int64[batch, seq] position_ids",
        "int64[rows] logit_rows",
        "int32[batch] past_lengths",
        *(f"{pool} `{name}`" for name in pools),
        *(f"{kinds[name]}[{', '.join(map(str, a.shape))}] `{name}`" for name, a in arrays.items()),
    ]
    outputs = [f"float[batch, rows, {VOCAB}] logits"]
    outputs += [f"{pool} `{name.replace('pool.', 'pool_out.')}`" for name in pools]
    text = f"agraph ({', '.join(inputs)}) => ({', '.join(outputs)}) <{', '.join(_shape_notes())}> {{ {body} }}"
    return text.replace("`", "").replace(".", "__DOT__").replace("ai__DOT__dspark__DOT__", "ai.dspark.")


def _named(text, arrays):
    """Parse, then give the names their dots back, which ONNX text has no way to write."""
    import re

    text = re.sub(r"(?<=\d)__DOT__(?=\d)", ".", text)
    model = text_model(text, **{name.replace(".", "__DOT__"): a for name, a in arrays.items()})
    graph = model.graph
    values = [*graph.inputs, *graph.initializers.values(), *(out for node in graph for out in node.outputs)]
    import onnx_ir as ir

    dotted = [v for v in values if "__DOT__" in str(v.name)]
    ir.convenience.rename_values(dotted, [str(v.name).replace("__DOT__", ".") for v in dotted])
    return model
