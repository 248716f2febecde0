"""Open a GGUF file with every count, length and offset checked against the file before it is used."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dsc.bundle_schema.errors import ModelError

MAX_ARRAY_ITEMS = 1 << 22
MAX_TENSORS = 1 << 16
MAX_DIMS = 4

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GgufTensor:
    """One tensor as it lies in the file.

    Attributes:
        kind: the name of its GGML type, e.g. ``Q4_1``.
        shape: in NumPy's order, rows first.
        data: a view of the mapped file: elements for float types, bytes [..., bytes of a row] for block types.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    data: np.ndarray[Any, Any]


@dataclass(frozen=True)
class GgufFile:
    """Metadata and tensors of a GGUF file; nothing of the tensors is read yet."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        """The model family in llama.cpp's naming, e.g. ``llama``."""
        return str(self.metadata["general.architecture"])

    def text(self, key: str) -> str:
        """A string of the metadata, empty when it is missing."""
        value = self.metadata.get(key, "")
        return value if isinstance(value, str) else ""


def open_gguf(path: Path) -> GgufFile:
    """Map a GGUF file (format versions 2 and 3).

    Raises:
        ModelError: the file cannot be read or is malformed; memory stays bounded by a small multiple of its header.
    """
    # An offset so large that the library's sum of unsigned numbers wraps around would lead into the file again.
    with _as_model_error(path), np.errstate(over="raise"):
        reader = _bounded_reader()(path)
        metadata = {name: _value(field) for name, field in reader.fields.items() if not name.startswith("GGUF.")}
        tensors = tuple(
            GgufTensor(
                tensor.name, tensor.tensor_type.name, tuple(reversed(tensor.shape.tolist())), np.asarray(tensor.data)
            )
            for tensor in reader.tensors
        )
    if not isinstance(metadata.get("general.architecture"), str):
        raise ModelError(str(path), "the metadata must name general.architecture, it does not")
    return GgufFile(path, metadata, tensors)


@contextmanager
def _as_model_error(path: Path) -> Iterator[None]:
    """What the gguf library and NumPy raise on a malformed file, as one error that names the file."""
    try:
        yield
    except OSError as error:
        raise ModelError(str(path), f"cannot read the file: {error.strerror or error}") from error
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError, struct.error) as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            str(path), f"not a sound GGUF file: {detail}", "download or convert it again; it may be cut short"
        ) from error


@cache
def _bounded_reader() -> Any:
    """The gguf library's reader with bounds; made here because importing the library takes a third of a second."""
    from gguf import GGUFReader

    return type("BoundedReader", (_Bounds, GGUFReader), {})


class _Bounds:
    """Reads nothing outside the file, and an array as one part instead of one part an item.

    The library slices past the end without noticing, so a wrong count would make it loop or allocate without limit;
    one part an item makes a vocabulary take seconds.
    """

    data: Any
    endianess: Any
    gguf_scalar_to_np: dict[Any, Any]

    def _get(self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise ValueError(f"{end} bytes are needed, the file has {len(self.data)}")
        return super()._get(int(offset), dtype, int(count), override_order)  # type: ignore[misc]

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        from gguf import GGUFValueType

        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[misc]
        item_type = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        if count > MAX_ARRAY_ITEMS:
            raise ValueError(f"an array may have {MAX_ARRAY_ITEMS} items, got {count}")
        start = orig_offs + 12
        if item_type == GGUFValueType.STRING:
            items, end = self._strings(start, count)
        elif item_type in self.gguf_scalar_to_np:
            values = self._get(start, self.gguf_scalar_to_np[item_type], count)
            items, end = values.tolist(), start + values.nbytes
        else:
            raise ValueError(f"arrays of type {item_type.name} are not supported")
        return end - orig_offs, [items], [0], [GGUFValueType.ARRAY, item_type]

    def _strings(self, offset: int, count: int) -> tuple[list[str], int]:
        length = struct.Struct("<Q" if self.endianess.name == "LITTLE" else ">Q")
        items = []
        for _ in range(count):
            (n_bytes,) = length.unpack_from(self.data, offset)
            start, offset = offset + 8, offset + 8 + n_bytes
            if offset > len(self.data):
                raise ValueError(f"a string of {n_bytes} bytes does not fit the file")
            items.append(self.data[start:offset].tobytes().decode("utf-8"))
        return items, offset

    def _build_tensor_info(self, offs: int, count: Any) -> Any:
        if int(count) > MAX_TENSORS:
            raise ValueError(f"at most {MAX_TENSORS} tensors are allowed, got {int(count)}")
        return super()._build_tensor_info(offs, count)  # type: ignore[misc]

    def _get_tensor_info_field(self, orig_offs: int) -> Any:
        field = super()._get_tensor_info_field(orig_offs)  # type: ignore[misc]
        dims = field.parts[3]
        if not 1 <= len(dims) <= MAX_DIMS or not all(0 < size <= len(self.data) * 64 for size in dims.tolist()):
            raise ValueError(f"tensor {field.name!r} must have 1 to {MAX_DIMS} positive dimensions that fit the file")
        return field


def _value(field: Any) -> Any:
    """A field as a Python value: number, string, boolean or list."""
    from gguf import GGUFValueType

    if field.types[0] == GGUFValueType.ARRAY:
        return field.parts[field.data[0]]
    return field.contents()
