"""From a path that a user gave to a loaded model: Hugging Face directory, GGUF file or ONNX model."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dsc.bundle_schema.errors import ModelError, RequestError
from dsc.compiler.exported import ExportedModel
from dsc.compiler.gate_checks import Reference
from dsc.compiler.hf_info import max_length
from dsc.compiler.onnx_external import ONNX_SUFFIX, onnx_file
from dsc.compiler.onnx_facts import StatedFacts

GGUF_SUFFIX = ".gguf"
N_REFERENCE_POSITIONS = 64


class Source(Protocol):
    """A model that was read."""

    def export(self) -> ExportedModel:
        """The forward graph."""

    def reference(self) -> Reference | None:
        """What the framework that the model came from computes, None when only the graph is at hand."""


@dataclass(frozen=True)
class GraphSource:
    """A model that came as a graph."""

    adopted: ExportedModel

    def export(self) -> ExportedModel:
        """As it was adopted."""
        return self.adopted

    def reference(self) -> None:
        """There is no other implementation to compare with."""


@dataclass(frozen=True)
class CheckpointSource:
    """A checkpoint that was read and is not exported yet.

    Attributes:
        model: a `transformers` causal language model in fp32 on the CPU.
        details: what `export_model` wants to know besides: tokenizer, generation, source, name, licence.
        block_weights: parameter name -> the quantised blocks it was computed from.
    """

    model: Any
    details: dict[str, Any]
    block_weights: dict[str, Any] = field(default_factory=dict)

    def export(self) -> ExportedModel:
        """The forward graph. After it the model itself computes nothing any more."""
        from dsc.compiler.export_hf import export_model

        return export_model(self.model, block_weights=self.block_weights, **self.details)

    def reference(self, seed: int = 0) -> Reference:
        """What the framework itself computes on a few random tokens; call it before `export`."""
        import torch
        import transformers

        config = self.model.config.get_text_config(decoder=True)
        n_positions = min(N_REFERENCE_POSITIONS, max_length(config))
        ids = np.random.default_rng(seed).integers(0, int(config.vocab_size), n_positions)
        self.model.set_attn_implementation("eager")
        self.model.set_experts_implementation("eager")
        with torch.no_grad():
            logits = self.model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0]
        return Reference(
            framework=f"transformers {transformers.__version__}",
            ids=tuple(int(token) for token in ids),
            logits=logits.float().numpy(),
        )


def load_source(path: Path, stated: StatedFacts = StatedFacts()) -> Source:  # noqa: B008 - frozen
    """Read a model.

    Args:
        path: of a model directory, a GGUF file, an ONNX file or a directory with one.
        stated: what the files of an ONNX model do not say.

    Raises:
        ModelError: there is nothing at `path`, it is none of these, or it cannot be read.
        RequestError: end tokens are stated for a model that states its own.
    """
    require_source(path)
    graph = onnx_file(path)
    if graph is not None:
        from dsc.compiler.onnx_adopt import adopt_onnx

        return GraphSource(adopt_onnx(graph, stated))
    if stated.eos_ids:
        raise RequestError("eos_ids", "an ONNX model is required, other sources state their end tokens themselves")
    return _load_directory(path) if path.is_dir() else _load_gguf(path)


def require_source(path: Path) -> None:
    """Refuse a path that is neither a directory nor a GGUF or ONNX file.

    Raises:
        ModelError: says which.
    """
    if not os.path.exists(path):  # `Path.exists` raises for a name that is too long
        raise ModelError(str(path), "a Hugging Face directory, a GGUF or an ONNX file must be there, nothing is")
    if not path.is_dir() and not (path.is_file() and path.suffix.lower() in (GGUF_SUFFIX, ONNX_SUFFIX)):
        raise ModelError(
            str(path), f"a directory with config.json, a {GGUF_SUFFIX} or an {ONNX_SUFFIX} file is required"
        )


def _load_directory(path: Path) -> CheckpointSource:
    from dsc.compiler.hf_files import checkpoint_details, load_model

    path = path.resolve()
    return CheckpointSource(load_model(path), checkpoint_details(path))


def _load_gguf(path: Path) -> CheckpointSource:
    from dsc.compiler.gguf_import import read_gguf
    from dsc.compiler.hf_files import load_state_dict

    gguf = read_gguf(path)
    return CheckpointSource(
        load_state_dict(gguf.config, gguf.state_dict),
        {
            "tokenizer": gguf.tokenizer,
            "source": gguf.source,
            "name": gguf.name,
            "licence": gguf.licence,
        },
        gguf.block_weights,
    )
