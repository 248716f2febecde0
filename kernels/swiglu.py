"""`SwiGlu`: the gated activation of a merged gate-and-up projection, one node instead of four."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dsc.kernels.contract import Array, Axes, KernelContract, TensorRole
from dsc.kernels.function_text import parse_function

if TYPE_CHECKING:
    import onnx_ir as ir


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """y [.., F] = silu(gate) * up with x [.., 2 F] = gate, then up (Shazeer 2020)."""
    gate, up = np.split(inputs["x"].astype(np.float64), 2, axis=-1)
    decayed = np.exp(-np.abs(gate))  # never overflows
    silu = gate * np.where(gate >= 0, 1, decayed) / (1 + decayed)
    return {"y": (silu * up).astype(inputs["x"].dtype)}


def make_inputs(axes: Axes, seed: int) -> dict[str, Array]:
    """Gates on both sides of zero, some large."""
    rng = np.random.default_rng(seed)
    return {"x": 4 * rng.standard_normal((axes["M"], axes["W"]), dtype=np.float32)}


def _nbytes(axes: Axes) -> int:
    return 12 * axes["M"] * axes["F"]


def _flops(axes: Axes) -> int:
    return 4 * axes["M"] * axes["F"]


SWIGLU = KernelContract(
    name="SwiGlu",
    axes={"M": "rows", "F": "inner size of the feed-forward block", "W": "2 F: gate, then up"},
    inputs=(TensorRole("x", ("M", "W")),),
    outputs=(TensorRole("y", ("M", "F")),),
    reference=reference,
    make_inputs=make_inputs,
    nbytes=_nbytes,
    flops=_flops,
    example={"M": 3, "F": 37, "W": 74},
)

_BODY = """
SwiGlu (x) => (y) {
  gate, up = Split <axis = -1, num_outputs = 2> (x)
  logistic = Sigmoid (gate)
  silu = Mul (gate, logistic)
  y = Mul (silu, up)
}
"""


def function_body() -> ir.Function:
    """The operator in standard operators."""
    return parse_function(_BODY)


def function_for(node: ir.Node) -> ir.Function:
    """The body of a node: there is one only."""
    return function_body()
