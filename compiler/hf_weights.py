"""Read the safetensors of a model directory as fp32 with little more memory than the fp32 weights need.

A memory-mapped file counts as resident while it stays mapped, so files of another element type are mapped for some
tensors at a time. fp32 tensors stay views of the mapped file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsc.bundle_schema.errors import ModelError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_GROUP_BYTES = 128 * 2**20


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of `directory`.

    Raises:
        ModelError: there are none, the index is malformed, or it names a file that is missing or elsewhere.
    """
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    index = directory / INDEX
    if not index.is_file():
        raise ModelError(
            str(directory), f"{SINGLE} or {INDEX} must exist, neither does", "convert to safetensors first"
        )
    try:
        names = sorted(set(map(str, json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelError(str(index), f"the index must map parameters to files: {error}") from error
    bad = next((name for name in names if Path(name).name != name or not (directory / name).is_file()), None)
    if bad is not None:
        raise ModelError(str(index), f"every file of the index must lie beside it, {bad} does not")
    return [directory / name for name in names]


def read_weights(directory: Path) -> dict[str, Any]:
    """Parameter name -> tensor; floating-point tensors as fp32.

    Raises:
        ModelError: a file is missing, truncated or not safetensors.
    """
    return {name: tensor for path in weight_files(directory) for name, tensor in _read_file(path)}


def _read_file(path: Path) -> Iterator[tuple[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            groups = list(_groups(file))
        for group in groups:
            with safe_open(path, framework="pt") as file:
                for name in group:
                    yield name, _as_fp32(file.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise ModelError(str(path), f"the file cannot be read as safetensors: {error}") from error


def _groups(file: Any) -> Iterator[list[str]]:
    """The file's tensors in stored order, in groups of about `_GROUP_BYTES`."""
    group: list[str] = []
    size = 0
    for name in file.offset_keys():
        elements = 1
        for axis in file.get_slice(name).get_shape():
            elements *= axis
        group.append(name)
        size += 2 * elements
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    yield group


def _as_fp32(tensor: Any) -> Any:
    import torch

    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor
