"""How a bundle is laid out as a ZIP file: names, alignment, headers. Shared by writer and reader.

The bytes between payloads are a pure function of the members' names, sizes and checksums, so the reader
compares instead of interpreting, and equal input gives equal files.
"""

from __future__ import annotations

import os
import re
import struct
import zipfile
from typing import Final

from dsc.bundle_schema.bundle_errors import BadMemberName
from dsc.bundle_schema.errors import RequestError

PAGE: Final = 4096
SMALL_ALIGNMENT: Final = 64
WEIGHTS_NAME: Final = "weights/tensors.bin"
ZIP64_FROM: Final = 2**30
"""Members larger than this get ZIP64 headers; below the stdlib's own limit, so that it never decides."""

TIMESTAMP: Final = (1980, 1, 1, 0, 0, 0)
_DATE: Final = (1 << 5) | 1
FILE_ATTRIBUTES: Final = 0o100644 << 16
LOCATION_NBYTES: Final = 256
LOCAL_HEADER: Final = struct.Struct("<4s5H3L2H")

_DIRECTORY_RECORD: Final = struct.Struct("<4s4B4H3L5H2L")
_DIRECTORY_SIGNATURE: Final = b"PK\x01\x02"
_LOCAL_SIGNATURE: Final = b"PK\x03\x04"
_PLAIN: Final = 20
_WITH_ZIP64: Final = 45
_MASK32: Final = 0xFFFFFFFF
_UNIX: Final = 3
_PADDING_FIELD: Final = 0xD935  # the id that zipalign uses for padding; readers skip unknown fields anyway
_PADDING_HEADER: Final = struct.Struct("<HHH")
_ZIP64_FIELD_NBYTES: Final = 20
_NAME: Final = re.compile(r"[A-Za-z0-9._\-]+(/[A-Za-z0-9._\-]+)*")


def external_location(file_name: str) -> str:
    """The bundle's own file name as graphs write it for external data: 256 bytes, whatever the name.

    ``./`` is repeated in front (and one ``/`` doubled), so that a graph's location can be replaced when the
    file was renamed without changing the length of anything in the protobuf.

    Args:
        file_name: the name without its folder.

    Raises:
        RequestError: the name is empty, has a separator, or has more than 254 bytes.
    """
    nbytes = len(os.fsencode(file_name))
    if not file_name or file_name in (".", "..") or "/" in file_name or "\0" in file_name:
        raise RequestError(file_name or "file name", "a plain file name is required")
    if nbytes > LOCATION_NBYTES - 2:
        raise RequestError(file_name, f"a name of at most {LOCATION_NBYTES - 2} bytes is required, got {nbytes}")
    repeat, odd = divmod(LOCATION_NBYTES - nbytes, 2)
    return "./" * repeat + "/" * odd + file_name


STORED_LOCATION: Final = external_location("bundle.dsmodel")
"""What graphs inside a bundle name as the file of their weights, until they are loaded."""


def alignment_of(name: str) -> int:
    """Alignment of a member's payload: a page for the weights, which are memory-mapped, 64 bytes for the rest."""
    return PAGE if name == WEIGHTS_NAME else SMALL_ALIGNMENT


def has_zip64(name: str, nbytes: int) -> bool:
    """Whether a member has ZIP64 headers: large ones, and the weights, whose size is not known when they begin."""
    return name == WEIGHTS_NAME or nbytes > ZIP64_FROM


def check_name(name: str, where: str) -> None:
    """Refuse names that are absolute, leave the bundle, or mean different things on different systems.

    Raises:
        BadMemberName: says what is allowed.
    """
    parts = name.split("/")
    if len(name) > 255 or not _NAME.fullmatch(name) or "." in parts or ".." in parts:
        raise BadMemberName(where, f"member names are relative paths of letters, digits and ._-/, got {name[:80]!r}")


def member_info(name: str, header_offset: int, nbytes: int) -> zipfile.ZipInfo:
    """The writer's record of a member whose header starts at `header_offset`."""
    info = zipfile.ZipInfo(name, TIMESTAMP)
    info.create_system = _UNIX
    info.external_attr = FILE_ATTRIBUTES
    info.file_size = nbytes
    info.extra = _padding(name, header_offset, has_zip64(name, nbytes))
    return info


def local_header(name: str, header_offset: int, nbytes: int, crc: int) -> bytes:
    """The bytes before a member's payload; the reader compares, so this is written apart from the writer."""
    zip64 = has_zip64(name, nbytes)
    extra = _padding(name, header_offset, zip64)
    version, size = _PLAIN, nbytes
    if zip64:
        version, size = _WITH_ZIP64, _MASK32
        extra += struct.pack("<HHQQ", 1, 16, nbytes, nbytes)
    fields = (version, 0, zipfile.ZIP_STORED, 0, _DATE, crc, size, size, len(name), len(extra))
    return LOCAL_HEADER.pack(_LOCAL_SIGNATURE, *fields) + name.encode() + extra


def directory_record(name: str, header_offset: int, nbytes: int, crc: int) -> bytes:
    """The record of a member in the ZIP directory at the end of the file."""
    limit = zipfile.ZIP64_LIMIT
    large = [nbytes, nbytes] if nbytes > limit else []
    far = [header_offset] if header_offset > limit else []
    values = large + far
    extra = struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values) if values else b""
    version = _WITH_ZIP64 if values or has_zip64(name, nbytes) else _PLAIN
    size = _MASK32 if large else nbytes
    offset = _MASK32 if far else header_offset
    head = (version, _UNIX, version, 0, 0, zipfile.ZIP_STORED, 0, _DATE, crc, size, size)
    tail = (len(name), len(extra), 0, 0, 0, FILE_ATTRIBUTES, offset)
    return _DIRECTORY_RECORD.pack(_DIRECTORY_SIGNATURE, *head, *tail) + name.encode() + extra


def _padding(name: str, header_offset: int, zip64: bool) -> bytes:
    """The extra field that brings the payload to a multiple of its alignment."""
    alignment = alignment_of(name)
    head = LOCAL_HEADER.size + len(name) + _PADDING_HEADER.size + (_ZIP64_FIELD_NBYTES if zip64 else 0)
    n_zeros = -(header_offset + head) % alignment
    return _PADDING_HEADER.pack(_PADDING_FIELD, 2 + n_zeros, alignment) + bytes(n_zeros)
