"""`ModelInfo` from a `transformers` configuration and what the observed pass showed."""

from __future__ import annotations

from typing import Any

from dsc.bundle_schema.model_info import ExpertsInfo, KvLayer, ModelInfo, RopeInfo
from dsc.compiler.export_probe import Observation

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_top_k")


def max_length(config: Any) -> int:
    """The number of positions that the configuration declares, as far as rotary frequencies stay the same.

    Where they change, `transformers` computes every cached key anew, which no cache of ours does. For the `dynamic`
    rotary type that is beyond the declared length; `longrope` states it.
    """
    lengths = (getattr(config, name, None) for name in _LENGTHS)
    declared = next((length for length in lengths if isinstance(length, int) and length > 0), 2048)
    changes = [
        rope.get("original_max_position_embeddings") or declared
        for rope in _rope_parameters(config)
        if rope.get("rope_type") == "longrope"
    ]
    longest: int = min([declared, *changes])
    return longest


def model_info(
    model: Any,
    config: Any,
    observation: Observation,
    generation: Any = None,
    *,
    name: str = "",
    licence: str | None = None,
) -> ModelInfo:
    """The facts about `model`.

    Args:
        model: the loaded model; its parameters are counted once each, tied ones included once.
        config: its text configuration.
        observation: its layers.
        generation: its generation configuration, None when it has none.
        name: of the source.
        licence: of the weights, where known.
    """
    return ModelInfo(
        architecture=type(model).__name__,
        model_type=str(config.model_type),
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        n_layers=len(observation.layers),
        n_heads=max(layer.attention.n_heads for layer in observation.layers),
        max_length=max_length(config),
        n_parameters=sum(parameter.numel() for parameter in model.parameters()),
        kv_layers=tuple(_kv_layer(layer.attention) for layer in observation.layers),
        bos_id=_one_id(generation, config, "bos_token_id"),
        eos_ids=_ids(generation, config, "eos_token_id"),
        pad_id=_one_id(generation, config, "pad_token_id"),
        rope=_rope(config),
        experts=_experts(model, config),
        name=name,
        licence=licence,
    )


def _kv_layer(attention: Any) -> KvLayer:
    return KvLayer(n_kv_heads=attention.n_kv_heads, head_dim=attention.head_dim, window=attention.window)


def _ids(generation: Any, config: Any, key: str) -> tuple[int, ...]:
    value = getattr(generation, key, None)
    value = getattr(config, key, None) if value is None else value
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(int(v) for v in values if v is not None and int(v) >= 0)


def _one_id(generation: Any, config: Any, key: str) -> int | None:
    return next(iter(_ids(generation, config, key)), None)


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Those of the model, or of each of its layer types; those of the global layers first."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = {kind: value for kind, value in parameters.items() if isinstance(value, dict)}
    return sorted(nested.values(), key=lambda value: value is not nested.get("full_attention")) or [parameters]


def _rope(config: Any) -> RopeInfo:
    """The parameters of the global layers where layer types have their own."""
    parameters = _rope_parameters(config)[0]
    theta = parameters.get("rope_theta")
    rest = {k: v for k, v in parameters.items() if k not in ("rope_type", "rope_theta", "type") and v is not None}
    return RopeInfo(
        kind=str(parameters.get("rope_type", "default")) if parameters else "none",
        theta=None if theta is None else float(theta),
        scaling=rest,
    )


def _experts(model: Any, config: Any) -> ExpertsInfo | None:
    if not any(hasattr(module, "has_post_expert_norm") for module in model.modules()):
        return None
    count = next((getattr(config, key) for key in _EXPERT_COUNTS if getattr(config, key, None)), None)
    top_k = next((getattr(config, key) for key in _EXPERTS_PER_TOKEN if getattr(config, key, None)), None)
    return None if count is None or top_k is None else ExpertsInfo(n_experts=int(count), top_k=int(top_k))
