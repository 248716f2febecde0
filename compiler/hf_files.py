"""Read a Hugging Face model directory: weights, configuration, tokenizer files. Offline, no code from the directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsc.bundle_schema.errors import ModelError
from dsc.compiler.export_hooks import HOOK, install_hooks
from dsc.compiler.hf_weights import read_weights

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def load_model(directory: Path) -> Any:
    """The causal language model of `directory` in fp32, its attention and experts routed to the hooks.

    Raises:
        ModelError: files are missing or unreadable, the architecture is unknown or not a causal language model, or
            weights are missing, superfluous in shape, or would be initialised at random.
    """
    config = load_config(directory)
    if getattr(config, "quantization_config", None) is not None:
        return _load(str(directory), directory, config=config)
    return _load(str(directory), None, config=config, state_dict=read_weights(directory))


def load_state_dict(config: Any, state_dict: Mapping[str, Any]) -> Any:
    """The causal language model of `config` over these fp32 tensors (parameter name -> tensor), without copies.

    Raises:
        ModelError: as `load_model`.
    """
    return _load(str(config.model_type), None, config=config, state_dict=dict(state_dict))


def _load(where: str, directory: Path | None, *, config: Any, **arguments: Any) -> Any:
    from safetensors import SafetensorError
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(where, f"a causal language model is needed, {config.model_type} has no such class")
    install_hooks()
    try:
        with _no_progress_bar():
            model, report = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
                directory,
                config=config,
                dtype="float32",
                attn_implementation=HOOK,
                experts_implementation=HOOK,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **arguments,
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelError(where, f"the model cannot be loaded: {_first_line(error)}") from error
    check_complete(where, report)
    return model.eval().requires_grad_(False)


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_config(directory: Path) -> Any:
    """The configuration of a decoder-only model.

    Raises:
        ModelError: there is none, it needs code from the directory, or it is an encoder-decoder's.
    """
    from transformers import AutoConfig

    path = directory / "config.json"
    if not path.is_file():
        raise ModelError(str(directory), "config.json must exist, it does not", "give a Hugging Face model directory")
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(str(path), f"the configuration cannot be read: {_first_line(error)}") from error
    check_decoder(str(path), config)
    return config


def check_decoder(where: str, config: Any) -> None:
    """Refuse what is not one decoder stack.

    Raises:
        ModelError: the configuration is an encoder-decoder's.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(where, f"a decoder-only model is needed, {config.model_type} is an encoder-decoder")


def check_complete(where: str, report: Any) -> None:
    """Refuse a model some of whose weights were not in the checkpoint (tied ones are not counted as missing).

    Raises:
        ModelError: a weight is missing or has another shape.
    """
    missing = sorted(_get(report, "missing_keys"))
    if missing:
        raise ModelError(
            where,
            f"every weight must be in the checkpoint, {len(missing)} are missing, first {missing[0]}",
            "a missing lm_head is filled from the embedding only when the configuration ties them",
        )
    mismatched = sorted(_get(report, "mismatched_keys"))
    if mismatched:
        name, stored, configured = mismatched[0]
        shapes = f"{name} has {tuple(stored)} instead of {tuple(configured)}"
        raise ModelError(where, f"every weight must have the configured shape, {shapes}")


def _get(report: Any, key: str) -> Any:
    return report[key] if isinstance(report, dict) else getattr(report, key)


def tokenizer_files(directory: Path) -> dict[str, bytes]:
    """The tokenizer's files as they are; none at all without tokenizer.json, which the others only add to."""
    found = {name: directory / name for name in _TOKENIZER_FILES}
    files = {name: path.read_bytes() for name, path in found.items() if path.is_file()}
    return files if "tokenizer.json" in files else {}


def checkpoint_details(directory: Path) -> dict[str, Any]:
    """What a model directory says besides configuration and weights, as `export_model` takes it."""
    return {
        "tokenizer": tokenizer_files(directory),
        "generation": generation_config(directory),
        "source": f"Hugging Face directory {directory.name}",
        "name": directory.name,
        "licence": licence_of(directory),
    }


def generation_config(directory: Path) -> Any:
    """The generation configuration, None without the file."""
    from transformers import GenerationConfig

    if not (directory / "generation_config.json").is_file():
        return None
    return GenerationConfig.from_pretrained(directory, local_files_only=True)


def licence_of(directory: Path) -> str | None:
    """The licence that the front matter of README.md names, None when it names none."""
    readme = directory / "README.md"
    if not readme.is_file():
        return None
    for line in readme.read_text(encoding="utf-8", errors="replace").splitlines()[1:40]:
        if line.startswith("license:"):
            return line.partition(":")[2].strip() or None
    return None


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return json.dumps(text.splitlines()[0], ensure_ascii=False).strip('"')
