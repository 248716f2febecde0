"""The rotary cos/sin table behind a pair of graph values, when it depends on positions alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from dsc.passes.graph_edit import constant_array, is_op, producer

FloatArray = npt.NDArray[Any]


@dataclass(frozen=True)
class RotaryTable:
    """cos and sin of ``position * frequencies``, both times `scale`.

    Attributes:
        frequencies: [D_rotary / 2], float32.
        positions: the graph value [B, S] that is multiplied.
    """

    frequencies: FloatArray
    scale: float
    positions: ir.Value

    def rows(self, n_positions: int) -> tuple[FloatArray, FloatArray]:
        """cos and sin for positions 0 .. n_positions - 1, [n_positions, D_rotary / 2] float32."""
        angles = np.arange(n_positions, dtype=np.float32)[:, None] * self.frequencies[None, :]
        return np.cos(angles) * np.float32(self.scale), np.sin(angles) * np.float32(self.scale)


def find_rotary_table(cos: ir.Value | None, sin: ir.Value | None) -> RotaryTable | str:
    """The table that `cos` and `sin` [B, S, D/2] are rows of, or why there is none."""
    cos_angles, cos_scale = _unwrap(cos, "Cos")
    sin_angles, sin_scale = _unwrap(sin, "Sin")
    if cos_angles is None or cos_angles is not sin_angles or cos_scale != sin_scale:
        return "cos and sin are not of the same angles"
    step = producer(cos_angles)
    if step is None or step.op_type not in ("Mul", "MatMul"):
        return "the angles are not positions times frequencies"
    for positions, frequencies in (step.inputs, tuple(reversed(step.inputs))):
        array = constant_array(frequencies)
        source = _position_ids(positions)
        if array is not None and source is not None and array.size == array.shape[-1]:
            return RotaryTable(array.reshape(-1).astype(np.float32), cos_scale, source)
    return "the frequencies are not constant (they depend on the length) or the positions are computed"


def _unwrap(value: ir.Value | None, op_type: str) -> tuple[ir.Value | None, float]:
    """The angles below ``op_type(angles) * scale``, None when the value is something else."""
    step, scale = producer(value), 1.0
    if step is not None and is_op(step, "Mul"):
        factor = constant_array(step.inputs[1])
        if factor is None or factor.size != 1:
            return None, scale
        scale, step = float(factor.reshape(-1)[0]), producer(step.inputs[0])
    if step is None or not is_op(step, op_type):
        return None, scale
    return step.inputs[0], scale


def _position_ids(value: ir.Value | None) -> ir.Value | None:
    """The graph input [B, S] below casts and added unit axes."""
    while value is not None and not value.is_graph_input():
        step = producer(value)
        if step is None or step.op_type not in ("Cast", "Unsqueeze"):
            return None
        value = step.inputs[0]
    return value
