"""Small tokenizers of the two kinds that matter: byte-level BPE, and BPE with byte fallback."""

from __future__ import annotations

import json

from gguf_samples import vocabulary
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers


def byte_level(specials: tuple[str, ...] = ("<|end|>", "<|im_start|>", "<|im_end|>")) -> Tokenizer:
    """Every byte, a few merges; the special tokens come first."""
    tokens, merges, _ = vocabulary()
    plain = tokens[3:]
    vocab = {token: index for index, token in enumerate((*specials, *plain))}
    tokenizer = Tokenizer(models.BPE(vocab, [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in specials])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Letters and spaces as tokens, everything else as ``<0x..>``; a leading space is cut when decoding."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnop", "▁a", "ab"]
    vocab = {token: index for index, token in enumerate(words)}
    merges = [("▁", "a"), ("a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in ("<s>", "</s>")])
    return tokenizer


def files_of(tokenizer: Tokenizer, template: str | None = None, **config: object) -> dict[str, bytes]:
    """The files of a tokenizer as a bundle holds them."""
    files = {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    if template is not None:
        files["chat_template.jinja"] = template.encode()
    return files
