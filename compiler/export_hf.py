"""Export any `transformers` causal language model to a forward graph, without code for its family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsc.bundle_schema.errors import ModelError
from dsc.compiler.export_graph import forward_graph, stamping
from dsc.compiler.export_hooks import HOOK, install_hooks
from dsc.compiler.export_probe import Observation, observe
from dsc.compiler.exported import ExportedModel
from dsc.compiler.hf_files import (
    check_decoder,
    checkpoint_details,
    load_model,
    load_state_dict,
)
from dsc.compiler.hf_info import max_length, model_info
from dsc.compiler.stamp_layers import StampingError
from dsc.compiler.stamp_markers import can_mark

if TYPE_CHECKING:
    import onnx_ir as ir


def export_hf(directory: Path, *, taps: Sequence[int] = (), stamp: bool = True) -> ExportedModel:
    """Export a model directory.

    Args:
        directory: config.json, safetensors (one file or shards), tokenizer files; links are followed.
        taps: 0-based layers whose output hidden states become the outputs `tap.{layer}`.
        stamp: trace each distinct layer once (False traces every layer: slow, the same graph).

    Raises:
        ModelError: the directory cannot be read, or the model cannot be expressed exactly.
    """
    directory = Path(directory).resolve()
    return export_model(load_model(directory), **checkpoint_details(directory), taps=taps, stamp=stamp)


def export_state_dict(config: Any, state_dict: Mapping[str, Any], **details: Any) -> ExportedModel:
    """Export a model given as a configuration and its weights (parameter name -> tensor), used without copying.

    `details` are those of `export_model`.

    Raises:
        ModelError: weights are missing or have another shape, or the model cannot be expressed exactly.
    """
    check_decoder(str(config.model_type), config)
    return export_model(load_state_dict(config, state_dict), **details)


def export_model(
    model: Any,
    *,
    tokenizer: dict[str, bytes] | None = None,
    generation: Any = None,
    block_weights: dict[str, Any] | None = None,
    source: str = "",
    name: str = "",
    licence: str | None = None,
    taps: Sequence[int] = (),
    stamp: bool = True,
) -> ExportedModel:
    """Export a loaded causal language model; its weights become the initializers' memory.

    Args:
        model: a `transformers` causal language model in fp32.
        tokenizer: file name -> content.
        generation: its generation configuration, for the end-of-text tokens.
        block_weights: initializer name -> the blocks it was dequantised from.
        source: where it came from, in words.
        name: the model's name.
        licence: of the weights.
        taps: 0-based layers whose output hidden states become outputs.
        stamp: trace each distinct layer once.

    Raises:
        ModelError: the model cannot be expressed exactly.
    """
    install_hooks()
    model = model.eval().requires_grad_(False)
    model.set_attn_implementation(HOOK)
    model.set_experts_implementation(HOOK)
    config = model.config.get_text_config(decoder=True)
    check_decoder(type(model).__name__, config)
    observation = observe(model, config, max_length(config))
    _check_taps(taps, observation)
    graph, notes = _graph(model, observation, taps, stamp)
    return ExportedModel(
        model=graph,
        info=model_info(model, config, observation, generation, name=name, licence=licence),
        tokenizer=tokenizer or {},
        block_weights=block_weights or {},
        source=source,
        notes=notes,
    )


def _graph(model: Any, observation: Observation, taps: Sequence[int], stamp: bool) -> tuple[ir.Model, tuple[str, ...]]:
    """The forward graph, stamped where the layers allow it."""
    if not stamp or not can_mark(observation):
        reason = "asked for" if not stamp else "layers do not map one hidden state to one"
        return _full_graph(model, observation, taps), (f"every layer was traced ({reason})",)
    try:
        return forward_graph(model, observation, stamping(observation, stamp=True), taps), ()
    except StampingError as error:
        return _full_graph(model, observation, taps), (f"every layer was traced ({error})",)


def _full_graph(model: Any, observation: Observation, taps: Sequence[int]) -> ir.Model:
    if taps:
        raise ModelError(type(model).__name__, "taps need layers that can be told apart in the graph")
    return forward_graph(model, observation, stamping(observation, stamp=False))


def _check_taps(taps: Sequence[int], observation: Observation) -> None:
    n_layers = len(observation.layers)
    bad = next((layer for layer in taps if not 0 <= layer < n_layers), None)
    if bad is not None:
        raise ModelError("taps", f"a tap must be a layer from 0 to {n_layers - 1}, got {bad}")
