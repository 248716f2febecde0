"""Trace a causal language model into the forward graph that `ExportedModel` describes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsc.compiler.export_experts import gate_form
from dsc.compiler.export_hooks import hooks_active
from dsc.compiler.export_nodes import NodeEmitter
from dsc.compiler.export_probe import Observation, distinct
from dsc.compiler.export_rotary import stateless_rotary
from dsc.compiler.export_tidy import fuse_known, tidy_trace
from dsc.compiler.stamp_layers import stamp_layers
from dsc.compiler.stamp_markers import marked_layers

if TYPE_CHECKING:
    import onnx_ir as ir

OPSET = 23
IR_VERSION = 11
_BATCH, _SEQ, _ROWS, _POOL = 2, 3, 2, 16


@dataclass(frozen=True)
class Stamping:
    """Which layers a graph is traced with; `marked` when the others are to be stamped from them."""

    traced: tuple[int, ...]
    marked: bool


def stamping(observation: Observation, *, stamp: bool) -> Stamping:
    """Trace the distinct layers only when `stamp`, else every layer."""
    return Stamping(distinct(observation) if stamp else tuple(range(len(observation.layers))), stamp)


def forward_graph(model: Any, observation: Observation, plan: Stamping, taps: Sequence[int] = ()) -> ir.Model:
    """The forward graph of `model`, its hooks being "dspark".

    Args:
        model: a causal language model in evaluation mode, fp32.
        observation: what `observe` reported of it.
        plan: which layers are traced.
        taps: 0-based layers whose output hidden state becomes the output `tap.{layer}`; needs a marked plan.

    Raises:
        StampingError: the layers cannot be told apart in the graph; tracing every layer still works.
    """
    emitter = _emitter(model, observation)
    marks = marked_layers(observation) if plan.marked else nullcontext()
    with hooks_active(emitter), stateless_rotary(model), marks, _quiet():
        graph = _trace(model, emitter, observation, plan)
    _name_traced_ports(graph.graph, plan.traced)
    _strip_prefix(graph)
    tidy_trace(graph)
    if plan.marked:
        stamp_layers(graph, observation, taps)
    _share_equal_memory(graph.graph, model)
    _name_ports(graph, observation, taps)
    fuse_known(graph)
    graph.ir_version = IR_VERSION
    return graph


def _emitter(model: Any, observation: Observation) -> NodeEmitter:
    layer_of = {id(module): index for index, layer in enumerate(observation.layer_list) for module in layer.modules()}
    gates = {id(m): gate_form(m) for m in model.modules() if hasattr(m, "has_post_expert_norm")}
    return NodeEmitter(layer_of, observation.masks, gates)


def _trace(model: Any, emitter: NodeEmitter, observation: Observation, plan: Stamping) -> ir.Model:
    import torch
    from torch.export import Dim

    class Forward(torch.nn.Module):  # type: ignore[misc]
        """Only the rows asked for reach the head. Token ids come last: sizes are then read from them."""

        def __init__(self) -> None:
            super().__init__()
            self.m = model

        def forward(
            self, k_pools: Any, v_pools: Any, past_lengths: Any, logit_rows: Any, position_ids: Any, input_ids: Any
        ) -> Any:
            pools = dict(zip(plan.traced, zip(k_pools, v_pools, strict=True), strict=True))
            emitter.begin(pools, past_lengths)
            output = self.m(input_ids=input_ids, position_ids=position_ids, use_cache=False, logits_to_keep=logit_rows)
            kept = [emitter.pools_out[layer] for layer in plan.traced]
            return output.logits, [k for k, _ in kept], [v for _, v in kept]

    shapes = [observation.layers[layer].attention for layer in plan.traced]
    pools = [torch.zeros(_BATCH, s.n_kv_heads, _POOL, s.head_dim) for s in shapes]
    args = (
        pools,
        [pool.clone() for pool in pools],
        torch.zeros(_BATCH, dtype=torch.int32),
        torch.arange(_ROWS),
        torch.arange(_SEQ)[None].repeat(_BATCH, 1),
        torch.ones((_BATCH, _SEQ), dtype=torch.int64),
    )
    batch, seq, rows, pool = Dim("batch"), Dim("seq"), Dim("rows"), Dim("max_rows")
    pool_axes = [{0: batch, 2: pool}] * len(pools)
    axes = (pool_axes, pool_axes, {0: batch}, {0: rows}, {0: batch, 1: seq}, {0: batch, 1: seq})
    with torch.no_grad():
        program = torch.export.export(Forward(), args, dynamic_shapes=axes, strict=False)
    exported = torch.onnx.export(
        program,
        args,
        dynamo=True,
        dynamic_shapes=axes,
        opset_version=OPSET,
        optimize=False,
        verbose=False,
    )
    traced: ir.Model = exported.model
    return traced


def _name_traced_ports(graph: ir.Graph, traced: Sequence[int]) -> None:
    """Give inputs and outputs their documented names; list entries were numbered by the exporter."""
    pools = [f"{role}_pool.{layer}" for role in "kv" for layer in traced]
    names = [*pools, "past_lengths", "logit_rows", "position_ids", "input_ids"]
    for value, name in zip(graph.inputs, names, strict=True):
        value.name = name
    names = ["logits", *(name.replace("_pool.", "_pool_out.") for name in pools)]
    for value, name in zip(graph.outputs, names, strict=True):
        value.name = name


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporter's advice to its own developers off the user's screen."""
    import logging

    exporter = logging.getLogger("torch.onnx")
    level = exporter.level
    exporter.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        exporter.setLevel(level)


def _strip_prefix(graph: ir.Model) -> None:
    """Initializers get the checkpoint's parameter names."""
    for value in list(graph.graph.initializers.values()):
        if value.name and value.name.startswith("m."):
            value.name = value.name[len("m.") :]
            if value.const_value is not None:
                value.const_value.name = value.name


def _share_equal_memory(graph: ir.Graph, model: Any) -> None:
    """A parameter with two names (a head tied to the embedding) becomes one initializer under the first name."""
    first_names = {_memory(parameter): name for name, parameter in model.named_parameters()}
    for name, value in list(graph.initializers.items()):
        first = first_names.get(_memory(getattr(value.const_value, "raw", None)), name)
        if first == name:
            continue
        present = graph.initializers.get(first)
        if present is None:
            value.name = first
        else:
            value.replace_all_uses_with(present)
            graph.initializers.pop(name)


def _memory(tensor: Any) -> tuple[Any, ...] | None:
    """What two tensors over the same memory have in common."""
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.numel() == 0:
        return None
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _name_ports(graph: ir.Model, observation: Observation, taps: Sequence[int]) -> None:
    """Order inputs and outputs as documented; pools are interleaved K, V by layer."""
    inputs = {value.name: value for value in graph.graph.inputs}
    outputs = {value.name: value for value in graph.graph.outputs}
    layers = range(len(observation.layers))
    pools = [f"{role}_pool.{layer}" for layer in layers for role in "kv"]
    pools_out = [f"{role}_pool_out.{layer}" for layer in layers for role in "kv"]
    wanted_inputs = ["input_ids", "position_ids", "logit_rows", "past_lengths", *pools]
    wanted_outputs = ["logits", *pools_out, *(f"tap.{layer}" for layer in taps)]
    graph.graph.inputs[:] = [inputs[name] for name in wanted_inputs]
    graph.graph.outputs[:] = [outputs[name] for name in wanted_outputs]
