"""Tokenizer files from a GGUF file's metadata."""

from __future__ import annotations

import json
from typing import Any

from dsc.bundle_schema.errors import ModelError
from dsc.compiler.gguf_reader import GgufFile

_CONTROL, _BYTE = 3, 6

# Pre-tokenizers by llama.cpp's names, besides those that `transformers` knows: GPT-2's own expression, and the same
# after every digit was cut off.
_GPT2_SPLIT = frozenset({"", "default", "gpt-2", "mpt", "olmo", "phi-2"})
_DIGITS_THEN_GPT2 = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})


def tokenizer_from_gguf(file: GgufFile) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json, generation_config.json and, when there is one, chat_template.jinja.

    The vocabulary becomes a tokenizer by `transformers`' own builders.

    Raises:
        ModelError: the file has no vocabulary, or a kind of tokenizer or pre-tokenizer that is not known.
    """
    facts = _facts(file)
    backend = _build(file, facts)
    _set_pre_tokenizer(file, facts, backend)
    _set_post_processor(file, facts, backend)
    specials = {
        name: facts["tokens"][token] for name in ("bos", "eos", "unk", "pad") if (token := facts[name]) is not None
    }
    config = {f"{name}_token": text for name, text in specials.items()}
    config |= {"add_bos_token": facts["add_bos"], "add_eos_token": facts["add_eos"]}
    config |= {"clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    generation = {f"{name}_token_id": facts[name] for name in ("bos", "eos", "pad") if facts[name] is not None}
    if facts["end_ids"]:
        generation["eos_token_id"] = facts["end_ids"] if len(facts["end_ids"]) > 1 else facts["end_ids"][0]
    files = {
        "tokenizer.json": backend.to_str().encode(),
        "tokenizer_config.json": _json(config),
        "generation_config.json": _json(generation),
    }
    if template := file.text("tokenizer.chat_template"):
        files["chat_template.jinja"] = template.encode()
    return files


def _json(content: dict[str, Any]) -> bytes:
    return json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False).encode()


def _facts(file: GgufFile) -> dict[str, Any]:
    """The metadata below ``tokenizer.ggml``, special ids checked against the vocabulary."""
    metadata = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()}
    tokens = metadata.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens) or not tokens:
        raise ModelError(str(file.path), "a vocabulary is required in tokenizer.ggml.tokens, there is none")
    facts: dict[str, Any] = {"tokens": tokens, "model": metadata.get("model"), "pre": metadata.get("pre", "")}
    for key in ("merges", "scores", "token_type"):
        facts[key] = metadata.get(key)
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        facts[name] = _special_id(file, f"{key}_token_id", metadata, len(tokens))
    others = (_special_id(file, f"{key}_token_id", metadata, len(tokens)) for key in ("eos", "eot", "eom"))
    facts["end_ids"] = sorted({token for token in others if token is not None})
    facts["add_bos"] = bool(metadata.get("add_bos_token", facts["model"] == "llama"))
    facts["add_eos"] = bool(metadata.get("add_eos_token", False))
    return facts


def _special_id(file: GgufFile, key: str, metadata: dict[str, Any], n_tokens: int) -> int | None:
    value = metadata.get(key)
    if value is not None and not (isinstance(value, int) and 0 <= value < n_tokens):
        raise ModelError(str(file.path), f"tokenizer.ggml.{key} must be below {n_tokens}, got {value}")
    return value


def _build(file: GgufFile, facts: dict[str, Any]) -> Any:
    """The tokenizer without its post-processor.

    Raises:
        ModelError: `transformers` has no builder for it.
    """
    from transformers.integrations.gguf import convert_gguf_tokenizer

    given = {"tokenizer_type": facts["model"], "pre_tokenizer_type": facts["pre"]}
    given |= {key: facts[key] for key in ("tokens", "merges", "scores", "token_type") if facts[key] is not None}
    try:
        backend, _ = convert_gguf_tokenizer(file.architecture, given)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(
            str(file.path),
            f"tokenizer {facts['model']!r} cannot be rebuilt from the metadata: {error}",
            "give the original Hugging Face directory",
        ) from error
    return backend


def _set_pre_tokenizer(file: GgufFile, facts: dict[str, Any], backend: Any) -> None:
    """How text is cut before byte-level merges; a name that nobody knows would give other tokens without a sign."""
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if facts["model"] != "gpt2" or facts["pre"] in GGUF_PRE_TOKENIZER_SPLITS or facts["pre"] in _GPT2_SPLIT:
        return
    if facts["pre"] not in _DIGITS_THEN_GPT2:
        raise ModelError(
            str(file.path),
            f"pre-tokenizer {facts['pre']!r} is not known",
            "give the original Hugging Face directory",
        )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _set_post_processor(file: GgufFile, facts: dict[str, Any], backend: Any) -> None:
    """Begin and end tokens as the metadata asks for them."""
    from tokenizers.processors import TemplateProcessing

    before = [facts["bos"]] if facts["add_bos"] and facts["bos"] is not None else []
    after = [facts["eos"]] if facts["add_eos"] and facts["eos"] is not None else []
    names = {token: facts["tokens"][token] for token in (*before, *after)}
    single = [*(names[token] for token in before), "$A", *(names[token] for token in after)]
    backend.post_processor = TemplateProcessing(
        single=single, special_tokens=[(name, token) for token, name in names.items()]
    )
