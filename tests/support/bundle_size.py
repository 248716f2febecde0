"""How much larger a bundle is than what its tensors need."""

from __future__ import annotations

from pathlib import Path

from dsc.bundle_schema.container import open_bundle


def size_over_tensors(path: Path) -> tuple[float, tuple[str, ...]]:
    """What the file adds to its unique tensors, as a share of their bytes, and the tokenizer's members."""
    with open_bundle(path) as bundle:
        tensors = sum({tensor.sha256: tensor.nbytes for tensor in bundle.weights()}.values())
        return path.stat().st_size / tensors - 1, bundle.manifest.tokenizer.members
