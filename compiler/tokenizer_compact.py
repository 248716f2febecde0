"""The same `tokenizer.json` in fewer bytes: a bundle stores it uncompressed."""

from __future__ import annotations

import json
from typing import Any


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
