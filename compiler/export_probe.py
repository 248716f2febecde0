"""One observed forward pass: where the layers are, what each attention asks for, and which layers are alike.

Two layers are alike when they are built alike (module classes, plain attributes, shapes), are called alike, ask the
attention hook for the same, and when the first one's code with the second one's weights gives bit-equal output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dsc.bundle_schema.errors import ModelError
from dsc.compiler.export_hooks import AttentionCall, ExpertsCall, hooks_active
from dsc.compiler.export_masks import CausalMask, causal_mask

_OWN_INDEX = frozenset({"layer_idx", "layer_index", "layer_id", "layer_number", "block_idx"})
_PLAIN = (int, float, str, bool, type(None))


@dataclass(frozen=True)
class AttentionShape:
    """What one layer's attention needs of the KV pool and of the operator."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None


@dataclass(frozen=True)
class ObservedLayer:
    """One decoder layer: its module, how it was called, what it returned, and what its attention asked for."""

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    settings: tuple[Any, ...]
    attention: AttentionShape


@dataclass(frozen=True)
class Observation:
    """What one forward pass showed.

    Attributes:
        layer_list: the `ModuleList` that holds the layers.
        path: its qualified name, e.g. ``model.layers``.
        layers: one entry a layer, in order.
        masks: the masks in the order in which the model builds them.
        representatives: layer i is a copy of layer ``representatives[i] <= i`` with other weights.
    """

    layer_list: Any
    path: str
    layers: tuple[ObservedLayer, ...]
    masks: tuple[CausalMask, ...]
    representatives: tuple[int, ...]


def observe(model: Any, config: Any, max_length: int) -> Observation:
    """Run `model` on two tokens and report its layers.

    Raises:
        ModelError: attention is missing, hidden from the hook, or cannot be expressed.
    """
    import torch

    observer = _Observer(type(model).__name__, max_length)
    calls: dict[int, tuple[Any, dict[str, Any], Any]] = {}
    hooks = [
        module.register_forward_hook(_keep_call(calls), with_kwargs=True)
        for modules in _module_lists(model).values()
        for module in modules
    ]
    ids = torch.tensor([[1, 2]])
    try:
        with torch.no_grad(), hooks_active(observer):
            model(input_ids=ids, position_ids=torch.tensor([[3, 4]]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    path, layer_list = _find_layers(model, config, observer)
    layers = tuple(_observed(module, calls[id(module)], observer.of_layer(module)) for module in layer_list)
    return Observation(layer_list, path, layers, tuple(observer.masks), _representatives(layers, config))


def distinct(observation: Observation) -> tuple[int, ...]:
    """The layers that are not a copy of an earlier one."""
    return tuple(i for i, first in enumerate(observation.representatives) if i == first)


@dataclass
class _Observer:
    """A hook handler that records; attention and experts keep their shapes and depend on every input."""

    where: str
    max_length: int
    masks: list[CausalMask] = field(default_factory=list)
    calls: list[AttentionCall] = field(default_factory=list)

    def mask(self, mask_function: Any) -> CausalMask:
        self.masks.append(causal_mask(mask_function, self.max_length, self.where))
        return self.masks[-1]

    def attention(self, call: AttentionCall) -> Any:
        name = type(call.module).__name__
        if call.key.shape[2] != call.query.shape[2]:
            raise ModelError(name, "attention must read the new tokens' own keys; cross-attention cannot be expressed")
        if call.value.shape[-1] > call.key.shape[-1]:
            sizes = f"{call.value.shape[-1]} against {call.key.shape[-1]}"
            raise ModelError(name, f"value heads must not be wider than key heads, got {sizes}")
        self.calls.append(call)
        groups = call.query.shape[1] // call.key.shape[1]
        key = call.key.repeat_interleave(groups, 1)[..., : call.value.shape[-1]]
        mixed = call.query[..., : call.value.shape[-1]] + key + call.value.repeat_interleave(groups, 1)
        return mixed if call.sinks is None else mixed + call.sinks.reshape(1, -1, 1, 1)

    def experts(self, call: ExpertsCall) -> Any:
        eager: Callable[..., Any] = type(call.module).forward.__wrapped__
        return eager(call.module, call.hidden, call.indices, call.weights)

    def of_layer(self, layer: Any) -> list[AttentionCall]:
        inside = {id(module) for module in layer.modules()}
        return [call for call in self.calls if id(call.module) in inside]


def _keep_call(calls: dict[int, tuple[Any, dict[str, Any], Any]]) -> Callable[..., None]:
    def keep(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        calls[id(module)] = (args, kwargs, output)

    return keep


def _module_lists(model: Any) -> dict[str, Any]:
    import torch

    return {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.ModuleList)}


def _find_layers(model: Any, config: Any, observer: _Observer) -> tuple[str, Any]:
    """The outermost `ModuleList` that holds every attention that was called, one in each of its entries.

    Raises:
        ModelError: there is none; the message names the modules in the way.
    """
    name = type(model).__name__
    lists = _module_lists(model)
    if not observer.calls:
        raise ModelError(
            name,
            "attention must go through transformers' AttentionInterface, none of this model's did",
            "state-space, linear-attention and older model classes cannot be exported",
        )
    holding = {path: modules for path, modules in lists.items() if len(observer.of_layer(modules))}
    if not holding:
        raise ModelError(name, "attention must be inside a list of layers, this model has no such list")
    path = min(holding, key=len)
    layers = holding[path]
    counts = [len(observer.of_layer(layer)) for layer in layers]
    odd = next((i for i, count in enumerate(counts) if count != 1), None)
    if odd is not None:
        mixers = ", ".join(sorted({type(child).__name__ for child in layers[odd].children()}))
        raise ModelError(
            f"{name}: layer {odd}",
            f"each layer must call the attention hook exactly once, this one called it {counts[odd]} times ({mixers})",
            "linear attention, state-space, convolution and cross-attention layers cannot be exported",
        )
    if len(observer.calls) != len(layers) or len(layers) != config.num_hidden_layers:
        raise ModelError(
            name,
            f"one attention a layer is needed, got {len(observer.calls)} attentions, {len(layers)} layers of "
            f"{config.num_hidden_layers} in the configuration",
        )
    return path, layers


def _observed(module: Any, call: tuple[Any, dict[str, Any], Any], attentions: list[AttentionCall]) -> ObservedLayer:
    args, kwargs, output = call
    attention = attentions[0]
    shape = AttentionShape(
        attention.query.shape[1],
        attention.key.shape[1],
        attention.key.shape[-1],
        attention.value.shape[-1],
        attention.mask.window,
    )
    return ObservedLayer(module, args, kwargs, output, attention.settings, shape)


def _representatives(layers: tuple[ObservedLayer, ...], config: Any) -> tuple[int, ...]:
    kinds: dict[Any, list[int]] = {}
    found: list[int] = []
    for index, layer in enumerate(layers):
        alike = kinds.setdefault(_structure(layer, index, len(layers), config), [])
        first = next((i for i in alike if _same_code(layers[i], layer)), index)
        if first == index:
            alike.append(index)
        found.append(first)
    return tuple(found)


def _structure(layer: ObservedLayer, index: int, n_layers: int, config: Any) -> Any:
    """A hashable description of everything of a layer but its weights and its own number."""
    per_layer = tuple(
        (key, repr(value[index]))
        for key, value in sorted(config.to_dict().items())
        if isinstance(value, list) and len(value) == n_layers
    )
    modules = tuple((name, type(m).__qualname__, _plain(m)) for name, m in layer.module.named_modules())
    shapes = tuple((name, tuple(p.shape)) for name, p in layer.module.named_parameters())
    buffers = tuple((name, tuple(b.shape)) for name, b in layer.module.named_buffers())
    return per_layer, modules, shapes, buffers, _call_shape(layer), layer.settings, layer.attention


def _plain(module: Any) -> tuple[tuple[str, str], ...]:
    found = []
    for key, value in sorted(vars(module).items()):
        if (
            key in _OWN_INDEX
            or key in ("_modules", "_parameters", "_buffers")
            or key.endswith(("_hooks", "_with_kwargs"))
        ):
            continue
        found.append((key, _describe(value)))
    return tuple(found)


def _describe(value: Any) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        return repr(value.tolist())
    if isinstance(value, _PLAIN) or (isinstance(value, list | tuple) and all(isinstance(v, _PLAIN) for v in value)):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _call_shape(layer: ObservedLayer) -> tuple[Any, ...]:
    from torch.utils import _pytree as pytree

    leaves, spec = pytree.tree_flatten((layer.args, layer.kwargs))
    return str(spec), tuple(repr(x) if isinstance(x, (*_PLAIN, CausalMask)) else type(x).__name__ for x in leaves)


def _same_code(first: ObservedLayer, other: ObservedLayer) -> bool:
    """Whether `first`'s code with `other`'s weights is `other`, bit for bit, on what `other` was given."""
    import torch
    from torch.utils import _pytree as pytree

    tensors = dict(other.module.named_parameters()) | dict(other.module.named_buffers())
    observer = _Observer(type(first.module).__name__, 1)
    with torch.no_grad(), hooks_active(observer):
        output = torch.func.functional_call(first.module, tensors, other.args, other.kwargs)
    pairs = zip(pytree.tree_leaves(output), pytree.tree_leaves(other.output), strict=True)
    return all(not isinstance(a, torch.Tensor) or torch.equal(a, b) for a, b in pairs)
