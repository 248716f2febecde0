"""The hook handler that emits `ai.dspark` nodes while a model is traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dsc.compiler.export_experts import GateForm
from dsc.compiler.export_hooks import AttentionCall, ExpertsCall
from dsc.compiler.export_masks import CausalMask


class NodeEmitter:
    """Emits one VerifyAttention a layer and one Experts a mixture.

    Args:
        layer_of: id of an attention module -> number of its layer.
        masks: the masks that the observed pass saw, in order; a traced mask function cannot be evaluated.
        gates: id of an experts module -> how it combines gate and up projections.
    """

    def __init__(self, layer_of: dict[int, int], masks: Sequence[CausalMask], gates: dict[int, GateForm]) -> None:
        self._layer_of = layer_of
        self._masks = masks
        self._gates = gates
        self._next_mask = iter(masks)
        self._pools: dict[int, tuple[Any, Any]] = {}
        self._past_lengths: Any = None
        self.pools_out: dict[int, tuple[Any, Any]] = {}

    def begin(self, pools: dict[int, tuple[Any, Any]], past_lengths: Any) -> None:
        """Start a forward pass over these pools (layer -> K, V)."""
        self._next_mask = iter(self._masks)
        self._pools, self._past_lengths = pools, past_lengths
        self.pools_out = {}

    def mask(self, mask_function: Any) -> CausalMask:
        """The mask that the observed pass saw at this place."""
        return next(self._next_mask)

    def attention(self, call: AttentionCall) -> Any:
        """Emit `VerifyAttention`. Narrower value heads are padded with zeros, which the output drops again."""
        import torch

        layer = self._layer_of[id(call.module)]
        k_pool, v_pool = self._pools[layer]
        width, value_width = call.key.shape[-1], call.value.shape[-1]
        value = torch.nn.functional.pad(call.value, (0, width - value_width)) if width > value_width else call.value
        inputs = [call.query, call.key, value, k_pool, v_pool, self._past_lengths]
        output, k_out, v_out = torch.onnx.ops.symbolic_multi_out(
            "ai.dspark::VerifyAttention",
            inputs if call.sinks is None else [*inputs, call.sinks],
            {"scale": call.scale, "window": call.mask.window or -1, "softcap": call.softcap},
            dtypes=[call.query.dtype] * 3,
            shapes=[call.query.shape, k_pool.shape, v_pool.shape],
            version=1,
        )
        self.pools_out[layer] = (k_out, v_out)
        return output[..., :value_width] if width > value_width else output

    def experts(self, call: ExpertsCall) -> Any:
        """Emit `Experts` with the weights of all experts of the layer."""
        import torch

        module, gate = call.module, self._gates[id(call.module)]
        up = module.gate_up_proj if gate.gated else module.up_proj
        inputs = [call.hidden, call.indices.to(torch.int64), call.weights, up, module.down_proj]
        if module.has_bias:
            inputs += [module.gate_up_proj_bias if gate.gated else module.up_proj_bias, module.down_proj_bias]
        return torch.onnx.ops.symbolic(
            "ai.dspark::Experts",
            inputs,
            gate.attributes() | {"transposed": int(module.is_transposed)},
            dtype=call.hidden.dtype,
            shape=call.hidden.shape,
            version=1,
        )
