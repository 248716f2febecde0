"""Run an exported forward graph with onnx's reference evaluator and NumPy versions of the `ai.dspark` operators.

Slow and plain on purpose: neither onnxruntime nor the kernels that ship take part, so agreement with `transformers`
says that the graph itself is right.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from dsc.compiler.exported import ExportedModel

Array = npt.NDArray[Any]


class VerifyAttention(OpRun):
    op_domain = "ai.dspark"

    def _run(self, q, k, v, k_pool, v_pool, past, sinks=None, tree=None, *, scale, window, softcap):  # type: ignore[no-untyped-def]
        k_pool, v_pool = k_pool.copy(), v_pool.copy()
        out = np.zeros_like(q)
        group = q.shape[1] // k.shape[1]
        for b in range(q.shape[0]):
            start, end = int(past[b]), int(past[b]) + q.shape[2]
            k_pool[b, :, start:end], v_pool[b, :, start:end] = k[b], v[b]
            rows, keys = np.arange(start, end)[:, None], np.arange(end)[None, :]
            seen = keys <= rows
            if window > 0:
                seen &= keys > rows - window
            for h in range(q.shape[1]):
                score = q[b, h] @ k_pool[b, h // group, :end].T * scale
                if softcap > 0:
                    score = np.tanh(score / softcap) * softcap
                score = np.where(seen, score, -np.inf)
                peak = score.max(-1, keepdims=True)
                sink = 0.0
                if sinks is not None:
                    peak = np.maximum(peak, sinks[h])
                    sink = np.exp(sinks[h] - peak)
                weight = np.exp(score - peak)
                out[b, h] = weight / (weight.sum(-1, keepdims=True) + sink) @ v_pool[b, h // group, :end]
        return out.astype(q.dtype), k_pool, v_pool


class Experts(OpRun):
    op_domain = "ai.dspark"

    def _run(self, hidden, indices, weights, up, down, up_bias=None, down_bias=None, *, transposed, **form):  # type: ignore[no-untyped-def]
        if transposed:
            up, down = up.swapaxes(1, 2), down.swapaxes(1, 2)
        out = np.zeros_like(hidden)
        for t in range(hidden.shape[0]):
            for expert, weight in zip(indices[t], weights[t], strict=True):
                x = up[expert] @ hidden[t] + (0 if up_bias is None else up_bias[expert])
                y = down[expert] @ _gate(x, **form) + (0 if down_bias is None else down_bias[expert])
                out[t] += weight * y
        return (out,)


def _gate(x: Array, *, activation: str, gated: int, interleaved: int, alpha: float, limit: float) -> Array:
    if not gated:
        return _activate(activation, x)
    half = x.shape[-1] // 2
    gate, up = (x[::2], x[1::2]) if interleaved else (x[:half], x[half:])
    if activation == "swiglu_limited":
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return gate / (1 + np.exp(-alpha * gate)) * (up + 1)
    return _activate(activation, gate) * up


def _activate(name: str, x: Array) -> Array:
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "relu":
        return np.maximum(x, 0)
    if name == "relu2":
        return np.maximum(x, 0) ** 2
    if name == "gelu_tanh":
        return x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    raise NotImplementedError(name)


class ReferenceForward:
    """A model with its KV pools; each call appends the given tokens to every sequence of the batch."""

    def __init__(self, exported: ExportedModel, batch: int = 1, max_rows: int = 288) -> None:
        self._run = ReferenceEvaluator(ir.to_proto(exported.model), new_ops=[VerifyAttention, Experts])
        self.pools: dict[str, Array] = {}
        for layer, kv in enumerate(exported.info.kv_layers):
            for role in "kv":
                shape = (batch, kv.n_kv_heads, max_rows, kv.head_dim)
                self.pools[f"{role}_pool.{layer}"] = np.zeros(shape, np.float32)
        self.past = np.zeros(batch, np.int32)
        self.extra: dict[str, Array] = {}

    def __call__(self, ids: Array, rows: Array | None = None) -> Array:
        """Logits [B, R, V] of the rows of `ids` [B, S] (all rows by default)."""
        length = ids.shape[1]
        inputs = {
            "input_ids": ids.astype(np.int64),
            "position_ids": (self.past[:, None] + np.arange(length)).astype(np.int64),
            "logit_rows": np.arange(length) if rows is None else rows,
            "past_lengths": self.past,
        }
        outputs = dict(zip(self._run.output_names, self._run.run(None, inputs | self.pools), strict=True))
        for name in self.pools:
            self.pools[name] = outputs.pop(name.replace("_pool.", "_pool_out."))
        self.past = (self.past + length).astype(np.int32)
        logits: Array = outputs.pop("logits")
        self.extra = outputs
        return logits
