"""`VerifyAttention` over a pool of int8 rows with one scale per KV head for K and one for V.

New rows are rounded to the pool's grid before anything attends to them, so a row is seen with the same values
when it is new as in every later round: speculation does not change what is attended to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from dsc.kernels.contract import Array, Axes, TensorRole
from dsc.kernels.verify_attention import VERIFY_ATTENTION
from dsc.kernels.verify_attention import make_inputs as make_float_inputs
from dsc.kernels.verify_attention import reference as float_reference

_POOL = ("B", "Hkv", "M", "D")


def quantise(x: Array, scales: Array) -> Array:
    """int8 rows of x [B, Hkv, rows, D]: x / scales[Hkv] rounded half up and limited to +-127."""
    grid = np.floor(x.astype(np.float32) / scales.astype(np.float32)[:, None, None] + np.float32(0.5))
    rounded: Array = np.clip(grid, -127, 127).astype(np.int8)
    return rounded


def reference(inputs: Mapping[str, Array], attributes: Mapping[str, Any]) -> dict[str, Array]:
    """Quantise the new rows, attend to the pool's real values, return the int8 pools."""
    plain = dict(inputs)
    outputs: dict[str, Array] = {}
    for side in ("k", "v"):
        scales = plain.pop(f"{side}_scales").astype(np.float32)[:, None, None]
        new = quantise(inputs[side], inputs[f"{side}_scales"])
        plain[side] = new * scales
        plain[f"{side}_pool"] = inputs[f"{side}_pool"] * scales
        pool = inputs[f"{side}_pool"].copy()
        for b, past in enumerate(inputs["past_lengths"]):
            pool[b, :, past : past + new.shape[2]] = new[b]
        outputs[f"{side}_pool_out"] = pool
    return {"o": float_reference(plain, attributes)["o"], **outputs}


def make_inputs(axes: Axes, seed: int) -> dict[str, Array]:
    """The float operator's inputs with int8 pools and unequal scales."""
    rng = np.random.default_rng(seed)
    inputs = make_float_inputs(axes, seed)
    for side in ("k", "v"):
        scales = rng.uniform(0.02, 0.04, axes["Hkv"]).astype(np.float32)
        inputs[f"{side}_scales"] = scales
        inputs[f"{side}_pool"] = quantise(inputs[f"{side}_pool"], scales)
    return inputs


def _nbytes(axes: Axes) -> int:
    pool = 2 * axes["B"] * axes["Hkv"] * axes["M"] * axes["D"]
    rows = axes["B"] * axes["S"] * axes["D"]
    return pool + 2 * (2 * axes["Hq"] + 2 * axes["Hkv"]) * rows + 2 * axes["Hkv"] * rows


VERIFY_ATTENTION_INT8 = replace(
    VERIFY_ATTENTION,
    name="VerifyAttentionInt8",
    inputs=(
        *(
            replace(role, kind="pool") if role.name in ("k_pool", "v_pool") else role
            for role in VERIFY_ATTENTION.inputs
            if role.name != "row_offsets"
        ),
        TensorRole("k_scales", ("Hkv",), "float32"),
        TensorRole("v_scales", ("Hkv",), "float32"),
    ),
    outputs=(
        VERIFY_ATTENTION.outputs[0],
        TensorRole("k_pool_out", _POOL, "pool"),
        TensorRole("v_pool_out", _POOL, "pool"),
    ),
    reference=reference,
    make_inputs=make_inputs,
    nbytes=_nbytes,
)
