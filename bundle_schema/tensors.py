"""Element types and tensor specs with named axes."""

from __future__ import annotations

from enum import StrEnum
from math import prod
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class DType(StrEnum):
    """Element types that cross the bundle."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"
    UINT8 = "uint8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    BOOL = "bool"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEMSIZE[self]


_ITEMSIZE = {
    DType.FLOAT32: 4,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.INT8: 1,
    DType.UINT8: 1,
    DType.INT16: 2,
    DType.INT32: 4,
    DType.INT64: 8,
    DType.BOOL: 1,
}


class TensorSpec(BaseModel):
    """Name, element type and axes of a graph input or output; an axis is a size or a symbol's name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    dtype: DType
    axes: tuple[Annotated[int, Field(ge=0, le=2**40)] | str, ...]

    def shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        """The concrete shape when every symbol has a size.

        Raises:
            KeyError: a symbol has no size in `sizes`.
        """
        return tuple(axis if isinstance(axis, int) else sizes[axis] for axis in self.axes)

    def nbytes(self, sizes: dict[str, int]) -> int:
        """Bytes of the tensor when every symbol has a size."""
        return prod(self.shape(sizes)) * self.dtype.itemsize


class StrictModel(BaseModel):
    """Base of everything written into a bundle: frozen, unknown fields refused, no NaN, no coercion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


Count = Field(ge=0, le=2**53)
