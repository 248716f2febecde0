"""The three places where `transformers` lets a caller replace its own code: attention, masks and experts.

The functions registered here under the name "dspark" only translate what they receive into `AttentionCall` and
`ExpertsCall`; what happens with a call is decided by the `Handler` that `hooks_active` makes current: one that observes
(`export_probe`) or one that emits graph nodes (`export_nodes`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from dsc.bundle_schema.errors import ModelError
from dsc.compiler.export_masks import CausalMask

HOOK = "dspark"
_KNOWN_TENSORS = frozenset({"s_aux", "position_ids", "cache_position", "position_embeddings", "cos", "sin"})


@dataclass(frozen=True)
class AttentionCall:
    """One attention as the hook receives it: after rotation and query/key norms.

    Attributes:
        module: the attention module.
        query: [B, Hq, S, D]; `key`, `value`: [B, Hkv, S, D].
        scale: factor of the scores.
        mask: which keys a query sees.
        softcap: ``cap * tanh(score / cap)``, 0 for none.
        sinks: [Hq] extra logits in the softmax's denominator, None for none.
    """

    module: Any
    query: Any
    key: Any
    value: Any
    scale: float
    mask: CausalMask
    softcap: float
    sinks: Any

    @property
    def settings(self) -> tuple[float, int | None, float, bool]:
        """Everything of the call that is not a tensor."""
        return self.scale, self.mask.window, self.softcap, self.sinks is not None


@dataclass(frozen=True)
class ExpertsCall:
    """One mixture of experts: hidden [T, H], indices int64 [T, k], weights [T, k] of the chosen experts."""

    module: Any
    hidden: Any
    indices: Any
    weights: Any


class Handler(Protocol):
    """What to do with the calls of one forward pass."""

    def mask(self, mask_function: Any) -> CausalMask:
        """The mask of the next layers that share one."""

    def attention(self, call: AttentionCall) -> Any:
        """The output of an attention, [B, Hq, S, Dv]."""

    def experts(self, call: ExpertsCall) -> Any:
        """The output of the experts, [T, H]."""


_handlers: list[Handler] = []


@contextmanager
def hooks_active(handler: Handler) -> Iterator[None]:
    """Route the hooks of the models that run inside to `handler`."""
    _handlers.append(handler)
    try:
        yield
    finally:
        _handlers.pop()


def install_hooks() -> None:
    """Register the hooks with `transformers` under the name `HOOK`; calling it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ExpertsInterface

    AttentionInterface.register(HOOK, _attention)
    AttentionMaskInterface.register(HOOK, _mask)
    ExpertsInterface.register(HOOK, _experts)


def _mask(*_: Any, mask_function: Any, **__: Any) -> CausalMask:
    return _handlers[-1].mask(mask_function)


def _experts(module: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    return _handlers[-1].experts(ExpertsCall(module, hidden_states, top_k_index, top_k_weights))


def _attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Any, None]:
    name = type(module).__name__
    _check_extras(name, module, attention_mask, others)
    scale = float(scaling) if scaling is not None else float(query.shape[-1]) ** -0.5
    call = AttentionCall(module, query, key, value, scale, attention_mask, float(softcap or 0.0), others.get("s_aux"))
    return _handlers[-1].attention(call).transpose(1, 2).contiguous(), None


def _check_extras(name: str, module: Any, mask: Any, others: dict[str, Any]) -> None:
    """Refuse what reaches the hook and has no place in the operator.

    Raises:
        ModelError: a bias, a tensor or a mask that VerifyAttention does not take.
    """
    import torch

    if not isinstance(mask, CausalMask):
        raise ModelError(name, f"attention must use a causal mask that transformers builds, got {type(mask).__name__}")
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ModelError(name, "attention must be causal, this module declares itself bidirectional")
    unknown = [k for k, v in others.items() if isinstance(v, torch.Tensor) and k not in _KNOWN_TENSORS]
    if unknown:
        raise ModelError(name, f"attention takes a tensor that VerifyAttention has no input for: {unknown[0]}")
