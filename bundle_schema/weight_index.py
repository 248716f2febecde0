"""`weights/index.tsv`: which tensor lies where in `weights/tensors.bin`, and who uses it.

Opening a bundle reads neither, so it costs the same for ten tensors and for a hundred thousand.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Final

from dsc.bundle_schema.bundle_errors import BadWeightIndex
from dsc.bundle_schema.tensors import DType
from dsc.bundle_schema.zip_layout import SMALL_ALIGNMENT

if TYPE_CHECKING:
    from dsc.bundle_schema.manifest import Member

INDEX_NAME: Final = "weights/index.tsv"
MAX_INDEX_NBYTES: Final = 8 * 2**20
"""Room for some 30,000 tensors; a hostile index of this size takes less than 64 MiB to parse."""

_HEADER: Final = "sha256\tdtype\tshape\toffset\tusers"
_DTYPES: Final = {dtype.value: dtype for dtype in DType}
_ROW: Final = re.compile(r"([0-9a-f]{64})\t([a-z0-9]+)\t(\d{1,16}(?:x\d{1,16}){0,15}|)\t(\d{1,16})\t([ -~\t]*)")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One unique tensor: equal tensors are stored once, whichever graphs use them.

    Attributes:
        sha256: of its bytes, lower-case hexadecimal.
        offset: of its first byte, from the start of the file.
        users_text: `users` as the index has them.
    """

    sha256: str
    dtype: DType
    shape: tuple[int, ...]
    offset: int
    users_text: str = ""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def users(self) -> tuple[str, ...]:
        """``graph member:initializer name`` of every use."""
        return tuple(_unescape(user) for user in self.users_text.split("\t") if user)


def aligned(offset: int) -> int:
    """Where the next tensor starts when the one before ends at `offset`."""
    return offset + -offset % SMALL_ALIGNMENT


def escape_user(member: str, initializer: str) -> str:
    """One user as the index has it; what is not printable ASCII is escaped as in a Python string."""
    return f"{member}:{initializer}".encode("unicode_escape").decode()


def dump_index(tensors: Iterable[StoredTensor]) -> bytes:
    """The member's bytes: a header, then a line a tensor, in file order."""
    rows = (
        f"{tensor.sha256}\t{tensor.dtype}\t{'x'.join(map(str, tensor.shape))}\t{tensor.offset}\t{tensor.users_text}"
        for tensor in tensors
    )
    return "".join(f"{line}\n" for line in (_HEADER, *rows)).encode()


def parse_index(data: memoryview, where: str, region: Member) -> tuple[StoredTensor, ...]:
    """Read the index and check that its tensors fill the region, each where the one before allows it.

    Args:
        data: the member's bytes.
        where: for errors.
        region: the member with the tensors' bytes.

    Raises:
        BadWeightIndex: says which line is wrong, and how.
    """
    if len(data) > MAX_INDEX_NBYTES:
        raise BadWeightIndex(where, f"at most {MAX_INDEX_NBYTES} bytes are allowed, got {len(data)}")
    try:
        header, *lines, end = str(data, "ascii").split("\n")
    except ValueError as error:
        raise BadWeightIndex(where, f"lines of ASCII text are required: {error}") from None
    if header != _HEADER or end:
        raise BadWeightIndex(where, f"the columns {_HEADER.split()} and complete lines are required")
    tensors = tuple(_parse_lines(lines, where))
    expected = region.offset
    for number, tensor in enumerate(tensors, 2):
        expected = aligned(expected)
        if tensor.offset != expected:
            raise BadWeightIndex(where, f"line {number}: the tensor must start at {expected}, got {tensor.offset}")
        expected += tensor.nbytes
    if expected != region.offset + region.nbytes:
        raise BadWeightIndex(where, f"its tensors end at {expected}, their member at {region.offset + region.nbytes}")
    if len({tensor.sha256 for tensor in tensors}) != len(tensors):
        raise BadWeightIndex(where, "equal tensors must be stored once, got one SHA-256 twice")
    return tensors


def _parse_lines(lines: list[str], where: str) -> Iterator[StoredTensor]:
    for number, line in enumerate(lines, 2):
        row = _ROW.fullmatch(line)
        dtype = _DTYPES.get(row[2]) if row else None
        if row is None or dtype is None:
            raise BadWeightIndex(where, f"line {number} is no tensor: {line[:80]!r}")
        shape = tuple(map(int, row[3].split("x"))) if row[3] else ()
        yield StoredTensor(row[1], dtype, shape, int(row[4]), row[5])


def _unescape(user: str) -> str:
    return user.encode().decode("unicode_escape", errors="replace")
