"""Mark the layers of a model while it is exported, so that each distinct layer is exported once.

::

    h1 = layer0(h0, cos, sin)      ->   h0', cos', sin' = Begin(h0, cos, sin);  h1 = End(layer0(h0', cos', sin'))
    h2 = layer1(h1, cos, sin)      ->   h2 = Layer(h1, cos, sin)                 when layer 1 is a copy of layer 0

`Begin`, `End` and `Layer` are place-holder nodes of the domain `dsc.stamp` with the attribute `layer`; `stamp_layers`
removes them. The model's own loop over its layers, and what it hands to each, stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dsc.compiler.export_probe import Observation

DOMAIN = "dsc.stamp"


def can_mark(observation: Observation) -> bool:
    """Whether every layer maps one hidden state to one hidden state of the same shape."""
    return all(_hidden_index(layer.output, layer) is not None for layer in observation.layers)


@contextmanager
def marked_layers(observation: Observation) -> Iterator[None]:
    """Inside, the model's copies are place-holders and its distinct layers stand between markers."""
    import torch

    layers = observation.layer_list
    originals = list(layers)
    own_forwards = [vars(layer).get("forward") for layer in originals]
    try:
        for index, (layer, first) in enumerate(zip(originals, observation.representatives, strict=True)):
            output = observation.layers[index].output
            if index == first:
                layer.forward = _bracketed(layer.forward, index, output)
            else:
                layers[index] = _place_holder(torch, layer, index, output)
        yield
    finally:
        for index, (layer, forward) in enumerate(zip(originals, own_forwards, strict=True)):
            layers[index] = layer
            if forward is None:
                vars(layer).pop("forward", None)
            else:
                layer.forward = forward


def _hidden_index(output: Any, layer: Any) -> int | None:
    """Which tensor of the call is the hidden state that the output continues, None when that is not clear."""
    tensors = _tensors((layer.args, layer.kwargs))
    results = _tensors(output)
    if len(results) != 1 or not tensors or tensors[0].shape != results[0].shape:
        return None
    return 0


def _tensors(tree: Any) -> list[Any]:
    import torch
    from torch.utils import _pytree as pytree

    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _with_tensors(tree: Any, tensors: list[Any]) -> Any:
    """`tree` with its tensors, in order, replaced by `tensors`."""
    import torch
    from torch.utils import _pytree as pytree

    replacements = iter(tensors)
    return pytree.tree_map(lambda leaf: next(replacements) if isinstance(leaf, torch.Tensor) else leaf, tree)


def _bracketed(forward: Callable[..., Any], index: int, output: Any) -> Callable[..., Any]:
    def bracketed(*args: Any, **kwargs: Any) -> Any:
        inside = _emit("Begin", _tensors((args, kwargs)), index)
        args, kwargs = _with_tensors((args, kwargs), inside)
        hidden = _tensors(forward(*args, **kwargs))[0]
        return _with_tensors(output, _emit("End", [hidden], index))

    return bracketed


def _place_holder(torch: Any, layer: Any, index: int, output: Any) -> Any:
    """A module without weights that stands for `layer`; other attributes are answered by `layer`."""

    class PlaceHolder(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.__dict__["_stands_for"] = layer

        def __getattr__(self, name: str) -> Any:
            return getattr(self.__dict__["_stands_for"], name)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            tensors = _tensors((args, kwargs))
            return _with_tensors(output, _emit("Layer", tensors, index, n_outputs=1))

    return PlaceHolder()


def _emit(op: str, tensors: list[Any], index: int, n_outputs: int | None = None) -> list[Any]:
    import torch

    outputs = tensors[:n_outputs]
    return list(
        torch.onnx.ops.symbolic_multi_out(
            f"{DOMAIN}::{op}",
            tensors,
            {"layer": index},
            dtypes=[t.dtype for t in outputs],
            shapes=[t.shape for t in outputs],
            version=1,
        )
    )
