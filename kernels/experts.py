"""`Experts`: a mixture-of-experts feed-forward layer with the router's choice as input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dsc.kernels.contract import Array, Axes, KernelContract, TensorRole
from dsc.kernels.function_text import parse_function

if TYPE_CHECKING:
    import onnx_ir as ir

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_limited")


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """y [T, H] = sum over a token's k experts of ``weights * (gated(x up^T + up_bias) down^T + down_bias)``.

    Gate and up projections are the halves of `up`'s output, or alternate when `interleaved`; without a gate
    the whole output is activated. `transposed` weights are stored [E, in, out].
    """
    hidden, indices, weights = inputs["hidden"], inputs["indices"], inputs["weights"]
    up, down = inputs["up"], inputs["down"]
    if attributes.get("transposed", 0):
        up, down = up.swapaxes(1, 2), down.swapaxes(1, 2)
    out = np.zeros_like(hidden)
    for token, chosen in enumerate(indices):
        for expert, weight in zip(chosen, weights[token], strict=True):
            x = up[expert] @ hidden[token]
            if "up_bias" in inputs:
                x = x + inputs["up_bias"][expert]
            y = down[expert] @ _gated(x, attributes)
            if "down_bias" in inputs:
                y = y + inputs["down_bias"][expert]
            out[token] += weight * y
    return {"y": out}


def _gated(x: Array, attributes: Mapping[str, Any]) -> Array:
    activation = attributes.get("activation", "silu")
    if not attributes.get("gated", 1):
        return _activate(x, activation)
    if attributes.get("interleaved", 0):
        gate, up = x[::2], x[1::2]
    else:
        gate, up = np.split(x, 2)
    if activation == "swiglu_limited":
        limit, alpha = attributes["limit"], attributes["alpha"]
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        inner: Array = gate / (1 + np.exp(-alpha * gate)) * (up + 1)
        return inner
    inner = _activate(gate, activation) * up
    return inner


def _activate(x: Array, activation: str) -> Array:
    from math import erf

    positive: Array = np.maximum(x, 0)
    if activation in ("relu", "relu2"):
        return positive if activation == "relu" else positive**2
    if activation == "silu":
        share = 1 / (1 + np.exp(-x))
    elif activation == "gelu":
        share = 0.5 * (1 + np.vectorize(erf)(x / np.sqrt(2)))
    else:
        share = 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    product: Array = x * share
    return product


def make_inputs(axes: Axes, seed: int) -> dict[str, Array]:
    """Random weights with biases; every token uses distinct experts."""
    rng = np.random.default_rng(seed)
    t, h, f, e, k = (axes[name] for name in ("T", "H", "F", "E", "K"))

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, dtype=np.float32)

    return {
        "hidden": normal(t, h),
        "indices": np.stack([rng.permutation(e)[:k] for _ in range(t)]).astype(np.int64),
        "weights": rng.uniform(0.1, 1, (t, k)).astype(np.float32),
        "up": normal(e, 2 * f, h) / 4,
        "down": normal(e, h, f) / 4,
        "up_bias": normal(e, 2 * f),
        "down_bias": normal(e, h),
    }


def _nbytes(axes: Axes) -> int:
    return 4 * (3 * axes["E"] * axes["F"] * axes["H"] + 2 * axes["T"] * axes["H"])


def _flops(axes: Axes) -> int:
    return 6 * axes["T"] * axes["K"] * axes["F"] * axes["H"]


EXPERTS = KernelContract(
    name="Experts",
    axes={
        "T": "tokens",
        "H": "hidden size",
        "F": "inner size of an expert",
        "U": "rows of `up`: 2 F with a gate, F without",
        "E": "experts of the layer",
        "K": "experts a token uses",
    },
    inputs=(
        TensorRole("hidden", ("T", "H")),
        TensorRole("indices", ("T", "K"), "int64"),
        TensorRole("weights", ("T", "K")),
        TensorRole("up", ("E", "U", "H")),
        TensorRole("down", ("E", "H", "F")),
        TensorRole("up_bias", ("E", "U"), optional=True),
        TensorRole("down_bias", ("E", "H"), optional=True),
    ),
    outputs=(TensorRole("y", ("T", "H")),),
    attributes={
        "activation": ", ".join(ACTIVATIONS),
        "gated": "1: the output of `up` is gate and up",
        "interleaved": "1: gate and up alternate",
        "transposed": "1: weights are [E, in, out]",
        "alpha": "of swiglu_limited",
        "limit": "of swiglu_limited",
    },
    reference=reference,
    make_inputs=make_inputs,
    nbytes=_nbytes,
    flops=_flops,
    example={"T": 5, "H": 12, "F": 7, "U": 14, "E": 6, "K": 2},
)

# All experts run on all tokens and the router's weights, 0 for experts that were not chosen, select among
# them: no control flow, the whole weight tensor stays in the graph, and the cost is that of E / k times the work.
_BODY = """
Experts <activation, gated, interleaved, transposed, alpha, limit>
  (hidden, indices, weights, up, down{parameters}) => (y) {{
  up_in = {up_in} (up)
  down_in = {down_in} (down)
  axis0 = Constant <value_ints = [0]> ()
  x1 = Unsqueeze (hidden, axis0)
  projected0 = MatMul (x1, up_in)
{up_bias}
{gating}
  y0 = MatMul (inner, down_in)
{down_bias}
  n_tokens1 = Shape <start = 0, end = 1> (hidden)
  n_experts1 = Shape <start = 0, end = 1> (up)
  table_shape = Concat <axis = 0> (n_tokens1, n_experts1)
  zero_f = Constant <value_float = 0.0> ()
  zero = CastLike (zero_f, weights)
  empty = Expand (zero, table_shape)
  table = ScatterElements <axis = 1, reduction = "add"> (empty, indices, weights)
  table_t = Transpose <perm = [1, 0]> (table)
  axis2 = Constant <value_ints = [2]> ()
  share = Unsqueeze (table_t, axis2)
  weighted = Mul (each, share)
  y = ReduceSum <keepdims = 0> (weighted, axis0)
}}
"""
_HALVES = "  gate, linear = Split <axis = -1, num_outputs = 2> (projected)"
_INTERLEAVED = """
  start0 = Constant <value_ints = [0]> ()
  start1 = Constant <value_ints = [1]> ()
  end = Constant <value_ints = [9223372036854775807]> ()
  last = Constant <value_ints = [-1]> ()
  two = Constant <value_ints = [2]> ()
  gate = Slice (projected, start0, end, last, two)
  linear = Slice (projected, start1, end, last, two)
"""
_LIMITED = """
  limit_f = Constant <value_float: float = @limit> ()
  limit_t = CastLike (limit_f, projected)
  low = Neg (limit_t)
  gate_c = Min (gate, limit_t)
  linear_c = Clip (linear, low, limit_t)
  alpha_f = Constant <value_float: float = @alpha> ()
  alpha_t = CastLike (alpha_f, projected)
  steep = Mul (gate_c, alpha_t)
  opened = Sigmoid (steep)
  active = Mul (gate_c, opened)
  one_f = Constant <value_float = 1.0> ()
  one_t = CastLike (one_f, projected)
  raised = Add (linear_c, one_t)
  inner = Mul (active, raised)
"""
_ACTIVE = {
    "silu": "  opened = Sigmoid ({x})\n  active = Mul ({x}, opened)",
    "gelu": "  active = Gelu ({x})",
    "gelu_tanh": '  active = Gelu <approximate = "tanh"> ({x})',
    "relu": "  active = Relu ({x})",
    "relu2": "  positive = Relu ({x})\n  active = Mul (positive, positive)",
}


def function_body(attributes: Mapping[str, Any], has_bias: bool) -> ir.Function:
    """The operator in standard operators, for nodes with these attributes.

    Exact and complete, but every expert runs on every token.
    """
    transpose = "Transpose <perm = [0, 2, 1]>"
    is_transposed = bool(attributes.get("transposed", 0))
    text = _BODY.format(
        parameters=", up_bias, down_bias" if has_bias else "",
        up_in="Identity" if is_transposed else transpose,
        down_in="Identity" if is_transposed else transpose,
        up_bias=_bias("up_bias", "projected0", "projected") if has_bias else _same("projected0", "projected"),
        gating=_gating(attributes),
        down_bias=_bias("down_bias", "y0", "each") if has_bias else _same("y0", "each"),
    )
    return parse_function(text)


def function_for(node: ir.Node) -> ir.Function:
    """The body that fits a node's attributes and inputs; its overload names them."""
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    has_bias = len(node.inputs) > 5
    function = function_body(attributes, has_bias)
    form = [str(attributes.get("activation", "silu"))]
    form += [name for name in ("gated", "interleaved", "transposed") if attributes.get(name)]
    function.overload = "_".join([*form, "bias"] if has_bias else form)
    return function


def _bias(bias: str, source: str, result: str) -> str:
    return (
        f"  {bias}_axis = Constant <value_ints = [1]> ()\n"
        f"  {bias}3 = Unsqueeze ({bias}, {bias}_axis)\n  {result} = Add ({source}, {bias}3)"
    )


def _same(source: str, result: str) -> str:
    return f"  {result} = Identity ({source})"


def _gating(attributes: Mapping[str, Any]) -> str:
    activation = attributes.get("activation", "silu")
    if not attributes.get("gated", 1):
        return _ACTIVE[activation].format(x="projected") + "\n  inner = Identity (active)"
    halves = _INTERLEAVED if attributes.get("interleaved", 0) else _HALVES
    if activation == "swiglu_limited":
        return halves + _LIMITED
    return halves + "\n" + _ACTIVE[activation].format(x="gate") + "\n  inner = Mul (active, linear)"
