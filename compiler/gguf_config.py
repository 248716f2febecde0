"""The `transformers` configuration that a GGUF file's metadata describes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from dsc.bundle_schema.errors import ModelError
from dsc.compiler.gguf_reader import GgufFile

_LIST = 4096  # longer arrays are vocabularies and merges

# Metadata that changes what the model computes -> the configuration's name for it. `transformers` reads these for
# some architectures and passes over them in others.
_MUST_AGREE = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "attention.scale": "attention_multiplier",
}


def gguf_config(file: GgufFile) -> Any:
    """The configuration, by `transformers`' own mapping of the metadata.

    Raises:
        ModelError: `transformers` does not know the architecture, or metadata that changes what the model computes
            has no place in its configuration.
    """
    from transformers import AutoConfig

    embedding = next((tensor for tensor in file.tensors if tensor.name == "token_embd.weight"), None)
    if embedding is None:
        raise ModelError(str(file.path), "a language model has a tensor token_embd.weight, this file has none")
    with tempfile.TemporaryDirectory() as folder:
        stub = Path(folder) / "header.gguf"
        _write_header(file, stub, vocab_size=embedding.shape[0])
        try:
            config = AutoConfig.from_pretrained(folder, gguf_file=stub.name, local_files_only=True)
        except (ValueError, KeyError, IndexError, TypeError, OSError) as error:
            raise ModelError(
                str(file.path),
                f"architecture {file.architecture!r} cannot be read from GGUF: {error}",
                "give the original Hugging Face directory",
            ) from error
    config.vocab_size = embedding.shape[0]
    _apply_rope_scaling(file, config)
    _apply_behaviour(file, config)
    return config


def _write_header(file: GgufFile, path: Path, vocab_size: int) -> None:
    """A GGUF file with the same facts and tensor names, without vocabulary and weights.

    `transformers` converts every item of every array one by one, seconds for a vocabulary that no configuration
    needs.
    """
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, file.architecture)
    value_type = gguf.GGUFValueType
    size_key = f"{file.architecture}.vocab_size"
    for key, value in file.metadata.items():
        if key in ("general.architecture", size_key) or (isinstance(value, list) and not 0 < len(value) <= _LIST):
            continue
        kind = value_type.UINT64 if type(value) is int and value >= 2**31 else value_type.get_type(value)
        writer.add_key_value(key, value, kind)
    for tensor in file.tensors:
        writer.add_tensor(tensor.name, np.zeros(1, np.float32))
    writer.add_key_value(size_key, vocab_size, value_type.UINT32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _apply_rope_scaling(file: GgufFile, config: Any) -> None:
    """Rotary scaling, which the metadata writes alike for every architecture and `transformers` mostly ignores."""
    prefix = f"{file.architecture}.rope.scaling."
    kind = file.metadata.get(prefix + "type", "none")
    if kind == "none":
        return
    if kind not in ("linear", "yarn"):
        raise ModelError(
            str(file.path), f"rope scaling must be linear or yarn, got {kind!r}", "give the original directory"
        )
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    parameters |= {"rope_type": kind, "factor": float(file.metadata.get(prefix + "factor", 1.0))}
    original = file.metadata.get(prefix + "original_context_length")
    if kind == "yarn" and original is not None:
        parameters["original_max_position_embeddings"] = int(original)
    config.rope_parameters = parameters


def _apply_behaviour(file: GgufFile, config: Any) -> None:
    """Make the configuration agree with the metadata, or refuse what it has no name for."""
    for key, name in _MUST_AGREE.items():
        value = file.metadata.get(f"{file.architecture}.{key}")
        if not value:
            continue
        if not hasattr(config, name):
            raise ModelError(
                str(file.path),
                f"{file.architecture}.{key} = {value} has no counterpart in {type(config).__name__}",
                "give the original Hugging Face directory",
            )
        if not isinstance(value, list):
            setattr(config, name, value)
