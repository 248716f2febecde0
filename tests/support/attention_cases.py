"""Attention operators on the same case: inputs of one as those of another, outputs by the bodies."""

from __future__ import annotations

import numpy as np
from run_operator import run_operator


def to_qkv(inputs, seed):
    """Inputs of `VerifyAttention` as those of `QkvAttention`, with random angles."""
    rest = dict(inputs)
    packed = np.concatenate([rest.pop("q"), rest.pop("k"), rest.pop("v")], axis=1)
    rows = packed.shape[2]
    angles = np.random.default_rng(seed).uniform(0, 6, (packed.shape[0], rows, 9))
    turned = {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    return {
        "qkv": np.ascontiguousarray(packed.transpose(0, 2, 1, 3).reshape(packed.shape[0], rows, -1)),
        **turned,
        **rest,
    }


def by_body(contract, module, inputs, attributes):
    """The outputs of the operator's body."""
    names = [role.name for role in contract.inputs]
    body = module.function_body("sinks" in inputs, "tree_mask" in inputs, "row_offsets" in inputs)
    outputs = [role.name for role in contract.outputs]
    return run_operator(contract.name, inputs, names, outputs, attributes, body)
