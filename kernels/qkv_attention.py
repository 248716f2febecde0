"""`QkvAttention`: `VerifyAttention` fed by a packed projection, rotary embedding included, one node a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dsc.kernels import verify_attention, verify_attention_body
from dsc.kernels.contract import Array, Axes, KernelContract, TensorRole
from dsc.kernels.function_text import DOMAIN, parse_function

if TYPE_CHECKING:
    import onnx_ir as ir


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """o [B, S, Hq D] of qkv [B, S, (Hq + 2 Hkv) D]: queries, keys and values of all heads side by side.

    Queries and keys are turned by cos, sin [B, S, R]: element i of the first R with element i + R; elements
    from 2 R on stay (rotary embedding in its "rotate half" form, Su et al. 2021). Then as `VerifyAttention`.
    """
    qkv, cos, sin = inputs["qkv"], inputs["cos"], inputs["sin"]
    kv_heads, dim = inputs["k_pool"].shape[1], inputs["k_pool"].shape[3]
    heads = attributes.get("heads", qkv.shape[-1] // dim - 2 * kv_heads)
    split = qkv.reshape(*qkv.shape[:2], -1, dim).transpose(0, 2, 1, 3)
    q, k, v = np.split(split, [heads, heads + kv_heads], axis=1)
    rest = {name: inputs[name] for name in inputs if name not in ("qkv", "cos", "sin")}
    rest |= {"q": rotate(q, cos, sin), "k": rotate(k, cos, sin), "v": v}
    outputs = verify_attention.reference(rest, attributes)
    outputs["o"] = outputs["o"].transpose(0, 2, 1, 3).reshape(*qkv.shape[:2], -1)
    return outputs


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """x [B, H, S, D] with its first 2 R elements turned by cos, sin [B, S, R]."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    c, s = cos[:, None], sin[:, None]
    return np.concatenate([a * c - b * s, b * c + a * s, rest], axis=-1)


def make_inputs(axes: Axes, seed: int) -> dict[str, Array]:
    """As `VerifyAttention`'s, packed, with the angles of positions spread unevenly."""
    inputs = verify_attention.make_inputs(axes, seed)
    packed = np.concatenate([inputs.pop("q"), inputs.pop("k"), inputs.pop("v")], axis=1)
    angles = np.random.default_rng(seed + 1).uniform(0, 6, (axes["B"], axes["S"], axes["R"]))
    qkv = packed.transpose(0, 2, 1, 3).reshape(axes["B"], axes["S"], -1)
    turned = {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    return {"qkv": np.ascontiguousarray(qkv), **turned, **inputs}


_OLD = verify_attention.VERIFY_ATTENTION

QKV_ATTENTION = KernelContract(
    name="QkvAttention",
    axes={
        **_OLD.axes,
        "R": "turned pairs of a head, at most D / 2",
        "W": "(Hq + 2 Hkv) D: queries, keys, values",
        "O": "Hq D",
    },
    inputs=(
        TensorRole("qkv", ("B", "S", "W")),
        TensorRole("cos", ("B", "S", "R")),
        TensorRole("sin", ("B", "S", "R")),
        *_OLD.inputs[3:],
    ),
    outputs=(TensorRole("o", ("B", "S", "O")), *_OLD.outputs[1:]),
    attributes={**_OLD.attributes, "heads": "Hq", "kv_heads": "Hkv"},
    reference=reference,
    make_inputs=make_inputs,
    nbytes=_OLD.nbytes,
    flops=_OLD.flops,
    example={**_OLD.example, "R": 9, "W": 240, "O": 144},
)

_BODY = """
QkvAttention <heads, kv_heads, scale: float = 1.0, window: int = -1, softcap: float = 0.0>
  (qkv, cos, sin, k_pool, v_pool, past_lengths{parameters}) => (o, k_pool_out, v_pool_out) {{
  zeros = Constant <value_ints = [0, 0]> ()
  minus_one = Constant <value_ints = [-1]> ()
  one = Constant <value_ints = [1]> ()
  axis3 = Constant <value_ints = [3]> ()
  heads0 = Constant <value_int: int = @heads> ()
  kv_heads0 = Constant <value_int: int = @kv_heads> ()
  heads1 = Reshape (heads0, one)
  kv_heads1 = Reshape (kv_heads0, one)
  dim = Shape <start = 3, end = 4> (k_pool)
  unpacked = Concat <axis = 0> (zeros, minus_one, dim)
  by_row = Reshape (qkv, unpacked)
  by_head = Transpose <perm = [0, 2, 1, 3]> (by_row)
  parts = Concat <axis = 0> (heads1, kv_heads1, kv_heads1)
  q0, k0, v = Split <axis = 1> (by_head, parts)
  cos4 = Unsqueeze (cos, one)
  sin4 = Unsqueeze (sin, one)
  turned = Shape <start = 2, end = 3> (cos)
  twice = Add (turned, turned)
  still = Sub (dim, twice)
  pieces = Concat <axis = 0> (turned, turned, still)
  qa, qb, qc = Split <axis = 3> (q0, pieces)
  ka, kb, kc = Split <axis = 3> (k0, pieces)
  qa_cos = Mul (qa, cos4)
  qb_sin = Mul (qb, sin4)
  qb_cos = Mul (qb, cos4)
  qa_sin = Mul (qa, sin4)
  q_low = Sub (qa_cos, qb_sin)
  q_high = Add (qb_cos, qa_sin)
  q = Concat <axis = 3> (q_low, q_high, qc)
  ka_cos = Mul (ka, cos4)
  kb_sin = Mul (kb, sin4)
  kb_cos = Mul (kb, cos4)
  ka_sin = Mul (ka, sin4)
  k_low = Sub (ka_cos, kb_sin)
  k_high = Add (kb_cos, ka_sin)
  k = Concat <axis = 3> (k_low, k_high, kc)
  mixed, k_pool_out, v_pool_out = {domain}.VerifyAttention <scale: float = @scale, window: int = @window,
      softcap: float = @softcap> (q, k, v, k_pool, v_pool, past_lengths{parameters})
  rows_first = Transpose <perm = [0, 2, 1, 3]> (mixed)
  packed = Concat <axis = 0> (zeros, minus_one)
  o = Reshape (rows_first, packed)
}}
"""


def function_body(has_sinks: bool = False, has_tree: bool = False, packed: bool = False) -> ir.Function:
    """The operator in standard operators: rotary embedding, then the body of `VerifyAttention`.

    That body is put in rather than called: onnxruntime does not resolve calls between overloaded functions.
    """
    parameters = verify_attention_body.parameters(has_sinks, has_tree, packed)
    function = parse_function(_BODY.format(parameters=parameters, domain=DOMAIN))
    (call,) = (node for node in function if node.op_type == "VerifyAttention")
    _put_in(function, call, verify_attention_body.function_body(has_sinks, has_tree, packed))
    return function


def _put_in(function: ir.Function, call: ir.Node, body: ir.Function) -> None:
    """Replace a call by the nodes of its body, whose attributes have the caller's names."""
    import onnx_ir as ir

    for formal, given in zip(body.inputs, call.inputs, strict=True):
        if given is not None:
            ir.convenience.replace_all_uses_with(formal, given)
    results = dict(zip(call.outputs, tuple(body.outputs), strict=True))
    body.outputs.clear()
    for node in list(body):
        for value in node.outputs:
            value.name = f"attention_{value.name}"
        body.remove(node)
        function.insert_before(call, node)
    for old, new in results.items():
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    function.remove(call, safe=True)


def function_for(node: ir.Node) -> ir.Function:
    """The body that fits a node's optional inputs."""
    return verify_attention_body.function_for(node, function_body)
