"""Writing `weights/tensors.bin`: tensors end to end, each at a multiple of 64 bytes, equal ones once."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import BinaryIO, Final, TypeAlias

from dsc.bundle_schema import zip_layout
from dsc.bundle_schema.manifest import Member
from dsc.bundle_schema.tensors import DType
from dsc.bundle_schema.weight_index import StoredTensor, aligned, dump_index, escape_user
from dsc.bundle_schema.zip_layout import WEIGHTS_NAME

Buffer: TypeAlias = bytes | bytearray | memoryview
Payload: TypeAlias = Buffer | Iterable[Buffer]

_CHUNK: Final = 2**24


@dataclass
class WeightRegion:
    """The member while it is written; its size is known, and its header complete, when it is closed."""

    archive: zipfile.ZipFile
    file: BinaryIO
    _tensors: dict[str, StoredTensor] = field(default_factory=dict)
    _users: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._info = zip_layout.member_info(WEIGHTS_NAME, self.file.tell(), 0)
        self._stream = self.archive.open(self._info, "w", force_zip64=True)
        self._start = self._end = self.file.tell()
        self._digest = hashlib.sha256()

    def add(
        self, payload: Buffer | Collection[Buffer], dtype: DType, shape: tuple[int, ...], user: tuple[str, str]
    ) -> StoredTensor:
        """Write a tensor, or find the one with the same bytes; see `BundleWriter.add_weight`."""
        digest = hashlib.sha256()
        for chunk in chunks(payload):
            digest.update(chunk)
        sha256 = digest.hexdigest()
        if sha256 not in self._tensors:
            tensor = StoredTensor(sha256, dtype, shape, aligned(self._end))
            self._append(bytes(tensor.offset - self._end))
            for chunk in chunks(payload):
                self._append(chunk)
            if self._end != tensor.offset + tensor.nbytes:
                got = self._end - tensor.offset
                raise ValueError(f"{dtype} {list(shape)} takes {tensor.nbytes} bytes, got {got}")
            self._tensors[sha256] = tensor
            self._users[sha256] = []
        self._users[sha256].append(escape_user(*user))
        return self._tensors[sha256]

    def _append(self, data: Buffer) -> None:
        self._stream.write(data)
        self._digest.update(data)
        self._end += len(data)

    def abandon(self) -> None:
        """Let go of the file, which is to be removed."""
        self._stream.close()

    def close(self) -> Member:
        """Complete the member; returns its row of the members' table."""
        self._stream.close()
        self._info.extra = b""
        return Member(
            name=WEIGHTS_NAME, offset=self._start, nbytes=self._end - self._start, sha256=self._digest.hexdigest()
        )

    def index(self) -> bytes:
        """The bytes of the member that lists the tensors and their users."""
        rows = self._tensors.items()
        return dump_index(replace(tensor, users_text="\t".join(self._users[name])) for name, tensor in rows)


def chunks(payload: Payload) -> Iterator[memoryview]:
    """The payload's bytes in pieces of at most 16 MiB."""
    buffers = [payload] if isinstance(payload, bytes | bytearray | memoryview) else payload
    for buffer in buffers:
        view = memoryview(buffer)
        flat = view.cast("B") if view.nbytes else memoryview(b"")
        for start in range(0, flat.nbytes, _CHUNK):
            yield flat[start : start + _CHUNK]
