"""Read a GGUF file: configuration, weights with their own quantised blocks, tokenizer, provenance."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsc.compiler.gguf_blocks import BlockWeight
from dsc.compiler.gguf_config import gguf_config
from dsc.compiler.gguf_reader import open_gguf
from dsc.compiler.gguf_weights import read_weights
from dsc.compiler.tokenizer_gguf import tokenizer_from_gguf


@dataclass(frozen=True)
class GgufModel:
    """Everything that a GGUF file says of a model.

    Attributes:
        config: `transformers` configuration.
        state_dict: parameter name -> torch float32 tensor; a tied head is not repeated.
        block_weights: parameter name -> the quantised blocks it was dequantised from.
        dense: parameter name -> why a quantised matrix is carried dense only.
        tokenizer: file name -> content.
        name: ``general.name``, or the file's.
        licence: ``general.license``, None when the file names none.
        source: provenance in words.
    """

    config: Any
    state_dict: dict[str, Any]
    block_weights: dict[str, BlockWeight]
    dense: dict[str, str]
    tokenizer: dict[str, bytes]
    name: str
    licence: str | None
    source: str


def read_gguf(path: Path) -> GgufModel:
    """Read a GGUF file whole.

    Raises:
        ModelError: the file is malformed, its architecture, a tensor's type or its tokenizer is not supported.
    """
    path = Path(path)
    file = open_gguf(path)
    tokenizer = tokenizer_from_gguf(file)  # first: its errors are the cheapest and the clearest
    config = gguf_config(file)
    weights = read_weights(file, config)
    name = file.text("general.name") or path.stem
    return GgufModel(
        config=config,
        state_dict=weights.state_dict,
        block_weights=weights.block_weights,
        dense=weights.dense,
        tokenizer=tokenizer,
        name=name,
        licence=file.text("general.license") or None,
        source=_source(path, name, sorted({tensor.kind for tensor in file.tensors}), file.metadata),
    )


def _source(path: Path, name: str, kinds: list[str], metadata: dict[str, Any]) -> str:
    origin = metadata.get("general.source.url") or metadata.get("general.organization") or "an unnamed source"
    return f"GGUF file {path.name} ({name}, from {origin}; tensor types {', '.join(kinds)})"
