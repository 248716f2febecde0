"""SpeculativeVerify by its reference and by its body in onnxruntime, under one signature."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from dsc.kernels.speculative_verify import SPECULATIVE_VERIFY, input_names
from dsc.kernels.tail_graphs import greedy_tail, sampled_tail

Array = Any


@cache
def session(mode: str, sparse: bool, penalties: bool) -> ort.InferenceSession:
    """The tail of a mode."""
    model = greedy_tail(penalties) if mode == "greedy" else sampled_tail(mode, sparse, penalties)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    data = ir.to_proto(model).SerializeToString()
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def by_body(inputs: dict[str, Array], mode: str) -> dict[str, Array]:
    """The outputs by name, through onnxruntime."""
    sparse = "q_ids" in inputs and mode in ("rejection", "block")
    roles = {role.name: role for role in SPECULATIVE_VERIFY.inputs}
    form = (mode, sparse, "penalties" in inputs)
    given = {name: inputs[name].astype(roles[name].kind, copy=False) for name in input_names(*form)}
    outputs = [role.name for role in SPECULATIVE_VERIFY.outputs]
    return dict(zip(outputs, session(*form).run(outputs, given), strict=True))


def by_reference(inputs: dict[str, Array], mode: str) -> dict[str, Array]:
    """The outputs by name, by definition."""
    return SPECULATIVE_VERIFY.reference(inputs, {"mode": mode})


IMPLEMENTATIONS = {"reference": by_reference, "body": by_body}


def settings(n_batch: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> dict[str, Array]:
    """The same sampling parameters for every sequence."""
    return {
        "temperature": np.full(n_batch, temperature, np.float32),
        "top_k": np.full(n_batch, top_k, np.int32),
        "top_p": np.full(n_batch, top_p, np.float32),
        "min_p": np.full(n_batch, min_p, np.float32),
    }
