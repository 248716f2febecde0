"""Rotary embeddings whose frequencies depend on the length, as a selection inside the graph.

`transformers` recomputes the frequencies of the `dynamic` and `longrope` types from ``max(position_ids) + 1``, with
state kept between calls and one length for the whole batch. Here each sequence of the batch is rotated by its own
length in the call, without state. For one sequence that grows, this is what `transformers` does with its cache: keys
keep the rotation of the call that made them. So a result depends on how the tokens were divided into calls, there as
here: a caller that wants the result of one-token steps must not let a call straddle a change of frequencies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dsc.bundle_schema.errors import ModelError

_LENGTH_DEPENDENT = ("dynamic", "longrope")


@contextmanager
def stateless_rotary(model: Any) -> Iterator[None]:
    """Inside, the rotary modules of `model` with length-dependent frequencies select them per sequence."""
    changed = [m for m in model.modules() if any(kind in _LENGTH_DEPENDENT for kind in _kinds(m))]
    try:
        for module in changed:
            module.forward = _selecting_forward(module)
        yield
    finally:
        for module in changed:
            del module.forward


def _kinds(module: Any) -> tuple[str, ...]:
    rope_type = getattr(module, "rope_type", None)
    if isinstance(rope_type, dict):
        return tuple(rope_type.values())
    return (rope_type,) if isinstance(rope_type, str) else ()


def _selecting_forward(module: Any) -> Callable[..., Any]:
    """The module's own formula with each sequence's frequencies, [B, 1, D/2], in place of the usual [D/2]."""
    raw = getattr(type(module).forward, "__wrapped__", None)
    if raw is None:
        raise ModelError(type(module).__name__, "a length-dependent rotary embedding must use dynamic_rope_update")

    def forward(x: Any, position_ids: Any, layer_type: str | None = None) -> Any:
        kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
        extra = {} if layer_type is None else {"layer_type": layer_type}
        if kind not in _LENGTH_DEPENDENT:
            return raw(module, x, position_ids, **extra)
        frequencies = _frequencies(module, kind, position_ids.amax(dim=1, keepdim=True) + 1, layer_type)
        stand_in = copy.copy(module)
        buffer = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        stand_in._buffers = module._buffers | {buffer: frequencies[:, None]}
        return raw(stand_in, x, position_ids, **extra)

    return forward


def _frequencies(module: Any, kind: str, lengths: Any, layer_type: str | None) -> Any:
    """Inverse frequencies [B, D/2] for sequences of these lengths [B, 1]."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = module.config
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    compute = ROPE_INIT_FUNCTIONS[kind]
    extra = {} if layer_type is None else {"layer_type": layer_type}
    if kind == "longrope":
        switch = parameters["original_max_position_embeddings"]
        short, _ = compute(config, lengths.device, seq_len=switch, **extra)
        long, _ = compute(config, lengths.device, seq_len=switch + 1, **extra)
        return torch.where(lengths > switch, long, short)
    return compute(config, lengths.device, seq_len=lengths, **extra)[0]
