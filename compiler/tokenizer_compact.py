"""The same tokenizer in fewer bytes: a bundle stores its files uncompressed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dsc.bundle_schema.packed_vocabulary import TOKENIZER_NAME, pack_tokenizer


def compact_files(files: Mapping[str, bytes], most: int) -> dict[str, bytes]:
    """A tokenizer's files by name, with a smaller tokenizer.json.

    Args:
        most: bytes that tokenizer.json may have; a larger one is packed where that is possible. A reader then has
            more to do, so others are not.
    """
    if TOKENIZER_NAME not in files:
        return dict(files)
    compact = compact_tokenizer(files[TOKENIZER_NAME])
    return {**files, TOKENIZER_NAME: compact} | (pack_tokenizer(compact) if len(compact) > most else {})


def compact_tokenizer(data: bytes) -> bytes:
    """The file without white space, and with each BPE merge as ``"a b"`` instead of ``["a", "b"]``.

    The `tokenizers` library reads both forms as the same tokenizer. What is no JSON stays as it is.

    Args:
        data: content of a tokenizer.json.
    """
    try:
        tree = json.loads(data)
        _join_merges(tree)
        return json.dumps(tree, ensure_ascii=False, separators=(",", ":")).encode()
    except (ValueError, RecursionError):  # a lone surrogate cannot be encoded either
        return data


def _join_merges(tree: Any) -> None:
    """Merges as text, unless a part has a space or the line would look like a comment."""
    model = tree.get("model") if isinstance(tree, dict) else None
    if not isinstance(model, dict) or not isinstance(merges := model.get("merges"), list):
        return
    if not all(isinstance(merge, list) and len(merge) == 2 for merge in merges):
        return
    if not any(" " in left or " " in right or left.startswith("#version") for left, right in merges):
        model["merges"] = [f"{left} {right}" for left, right in merges]
