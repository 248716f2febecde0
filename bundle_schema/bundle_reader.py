"""Opening a bundle: one memory map, everything about its structure checked, no payload read.

The reader trusts nothing: sizes are bounded before anything of that size is allocated, headers are compared
with what the writer would have written, members must lie end to end, and the manifest must agree.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, NamedTuple, Self, cast

from dsc.bundle_schema import bundle_errors as errors
from dsc.bundle_schema import zip_layout
from dsc.bundle_schema.errors import RequestError
from dsc.bundle_schema.manifest import MANIFEST_NAME, Manifest, Member, parse_manifest
from dsc.bundle_schema.strict_json import MAX_JSON_NBYTES
from dsc.bundle_schema.weight_index import INDEX_NAME, StoredTensor, parse_index
from dsc.bundle_schema.zip_layout import WEIGHTS_NAME

MAX_DIRECTORY_NBYTES: Final = 2**18
_END: Final = struct.Struct("<4s4H2LH")
_END64: Final = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64: Final = struct.Struct("<4sLQL")
_HASH_CHUNK: Final = 2**24
_LOCAL_SIGNATURE: Final = b"PK\x03\x04"
_END_SIGNATURE: Final = b"PK\x05\x06"
_END64_SIGNATURE: Final = b"PK\x06\x06"
_LOCATOR64_SIGNATURE: Final = b"PK\x06\x07"


@dataclass(frozen=True)
class OpenBundle:
    """A bundle whose structure was checked, memory-mapped read-only.

    Attributes:
        path: as given to `open_bundle`.
        manifest: parsed and checked against the ZIP directory.
        members: the manifest's table by name, in file order.
        map: the whole file.
        identity: device, inode, size and modification time in ns of the file that is mapped.
    """

    path: Path
    manifest: Manifest
    members: dict[str, Member]
    map: mmap.mmap
    identity: tuple[int, int, int, int]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file; views that are still held keep it mapped until they go."""
        with suppress(BufferError):
            self.map.close()

    def member(self, name: str) -> Member:
        """The member's row of the table.

        Raises:
            MissingMember: there is none.
        """
        member = self.members.get(name)
        if member is None:
            raise errors.MissingMember(str(self.path), f"no member is named {name}", "see `dsc inspect`")
        return member

    def view(self, name: str) -> memoryview:
        """The member's bytes, not copied. Raises MissingMember."""
        member = self.member(name)
        return memoryview(self.map)[member.offset : member.offset + member.nbytes]

    def read(self, name: str) -> bytes:
        """A copy of the member's bytes. Raises MissingMember."""
        return bytes(self.view(name))

    def weights(self) -> tuple[StoredTensor, ...]:
        """Every unique tensor, in file order; the index is hashed and parsed at each call.

        Raises:
            ChecksumMismatch, BadWeightIndex: the index is damaged, or does not describe the weights.
        """
        if WEIGHTS_NAME not in self.members:
            return ()
        self.verify([INDEX_NAME])
        with self.view(INDEX_NAME) as data:
            return parse_index(data, f"{self.path}: {INDEX_NAME}", self.member(WEIGHTS_NAME))

    def verify(self, names: Iterable[str] | None = None, progress: Callable[[str, int], None] | None = None) -> None:
        """Hash members and compare with the manifest (whose own checksum was compared when opening).

        Args:
            names: which; all when None.
            progress: called with name and size after each.

        Raises:
            ChecksumMismatch: names the first member that is not what was written.
        """
        for name in list(self.members) if names is None else names:
            member = self.member(name)
            digest = hashlib.sha256()
            with self.view(name) as view:
                for start in range(0, member.nbytes, _HASH_CHUNK):
                    digest.update(view[start : start + _HASH_CHUNK])
                    self._forget(member.offset + start)
            if digest.hexdigest() != member.sha256:
                raise errors.ChecksumMismatch(
                    str(self.path),
                    f"{name} must have SHA-256 {member.sha256}, got {digest.hexdigest()}",
                    "compile or download it again",
                )
            if progress is not None:
                progress(name, member.nbytes)

    def _forget(self, offset: int) -> None:
        """Let go of the pages of a hashed chunk: who maps the file next would count them a second time."""
        start = offset - offset % mmap.PAGESIZE
        self.map.madvise(mmap.MADV_DONTNEED, start, min(_HASH_CHUNK, len(self.map) - start))


class _Located(NamedTuple):
    """A member as the ZIP directory has it; `offset` is the payload's."""

    name: str
    offset: int
    nbytes: int
    crc: int


def open_bundle(path: Path | str) -> OpenBundle:
    """Map a bundle and check its structure and manifest; payloads are `OpenBundle.verify`'s business.

    Raises:
        RequestError: there is no such file, or it is not a file.
        BundleError: of the kind that says what is wrong; see `bundle_errors`.
    """
    try:
        path = Path(path)
    except TypeError:
        raise RequestError("path", f"a path is required, got {path!r}") from None
    mapped, identity = _map(path)
    where = str(path)
    try:
        directory, n_members = _find_directory(mapped, where)
        infos = _list_members(mapped, n_members, where)
        located = _check_members(mapped, infos, directory, where)
        manifest = _read_manifest(mapped, located, where)
    except BaseException:
        mapped.close()
        raise
    members = {member.name: member for member in manifest.members}
    return OpenBundle(path, manifest, members, mapped, identity)


def _map(path: Path) -> tuple[mmap.mmap, tuple[int, int, int, int]]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise RequestError(str(path), f"cannot be opened: {error.strerror}") from None
    except ValueError as error:  # a zero byte, or a character that no file name holds
        raise RequestError(repr(str(path)), f"cannot be opened: {error}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise RequestError(str(path), "a .dsmodel file is required, got something else")
        if status.st_size == 0:
            raise errors.NotABundle(str(path), "the file is empty")
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), identity
    finally:
        os.close(descriptor)


def _find_directory(data: mmap.mmap, where: str) -> tuple[int, int]:
    """The ZIP directory's offset and number of members; it must end where the end records start."""
    if data[:4] != _LOCAL_SIGNATURE:
        raise errors.NotABundle(where, "a .dsmodel file (a ZIP file) is required, got other content")
    start = len(data) - _END.size
    if start < 0 or data[start : start + 4] != _END_SIGNATURE or data[-2:] != b"\0\0":
        found = data.rfind(_END_SIGNATURE, max(0, start - 2**16))
        if found < 0:
            raise errors.TruncatedBundle(where, "the end of the file is missing", "copy or download it again")
        raise errors.ExtraBytes(where, f"nothing may follow its end, got {start - found} bytes more")
    _, disk, first_disk, n_here, n_members, nbytes, offset, _ = _END.unpack(data[start:])
    locator = start - _LOCATOR64.size
    if locator > _END64.size and data[locator : locator + 4] == _LOCATOR64_SIGNATURE:
        start = locator - _END64.size
        signature, size, _, _, disk, first_disk, n_here, n_members, nbytes, offset = _END64.unpack(data[start:locator])
        if (signature, size) != (_END64_SIGNATURE, _END64.size - 12):
            raise errors.HeaderMismatch(where, "its ZIP64 end record is not where it must be")
        if _LOCATOR64.unpack(data[locator : locator + _LOCATOR64.size])[1:] != (0, start, 1):
            raise errors.HeaderMismatch(where, "its ZIP64 locator does not point to the end record")
    if (disk, first_disk) != (0, 0) or n_here != n_members:
        raise errors.HeaderMismatch(where, "a ZIP file in one part is required")
    if nbytes > MAX_DIRECTORY_NBYTES:
        raise errors.OversizedDirectory(
            where, f"a directory of at most {MAX_DIRECTORY_NBYTES} bytes is allowed, got {nbytes}"
        )
    if offset + nbytes != start:
        raise errors.HeaderMismatch(
            where, f"its directory must end at {start}, got {offset} + {nbytes}", "the file may be cut or joined"
        )
    return offset, n_members


def _list_members(data: mmap.mmap, n_members: int, where: str) -> list[zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(cast("BinaryIO", data)) as archive:  # a map reads and seeks like a file
            infos = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, EOFError) as error:
        raise errors.HeaderMismatch(where, f"its ZIP directory cannot be read: {error}") from None
    if len(infos) != n_members:
        raise errors.HeaderMismatch(where, f"its end record announces {n_members} members, got {len(infos)}")
    return infos


def _check_members(data: mmap.mmap, infos: list[zipfile.ZipInfo], directory: int, where: str) -> list[_Located]:
    """Every record is one that our writer makes, and the members fill the file without hole or overlap."""
    names: set[str] = set()
    folded: dict[str, str] = {}
    located: list[_Located] = []
    position, record_start = 0, directory
    for info in infos:
        _check_name(info, names, folded, where)
        _check_kind(info, where)
        payload = _check_local(data, info, position, directory, where)
        record = zip_layout.directory_record(info.filename, position, info.file_size, info.CRC)
        if record != data[record_start : record_start + len(record)]:
            raise errors.HeaderMismatch(where, f"{info.filename} has a directory record that no bundle writer makes")
        record_start += len(record)
        position = payload + info.file_size
        located.append(_Located(info.filename, payload, info.file_size, info.CRC))
    if position != directory:
        raise errors.ExtraBytes(where, f"the directory must follow the last member at {position}, got {directory}")
    if not located or located[-1].name != MANIFEST_NAME:
        raise errors.MissingMember(where, f"{MANIFEST_NAME} is required as the last member")
    return located


def _check_name(info: zipfile.ZipInfo, names: set[str], folded: dict[str, str], where: str) -> None:
    name = info.orig_filename
    zip_layout.check_name(name, where)
    if name in names:
        raise errors.DuplicateMember(where, f"{name} must be there once, is there twice")
    twin = folded.setdefault(name.lower(), name)
    if twin != name:
        raise errors.CaseTwinMember(where, f"{twin} and {name} differ in case only")
    names.add(name)


def _check_kind(info: zipfile.ZipInfo, where: str) -> None:
    name = info.filename
    if info.flag_bits & 1:
        raise errors.EncryptedMember(where, f"{name} is encrypted")
    if info.compress_type != zipfile.ZIP_STORED:
        raise errors.CompressedMember(where, f"{name} must be stored, is compressed by method {info.compress_type}")
    kind = stat.S_IFMT(info.external_attr >> 16)
    if kind != stat.S_IFREG:
        raise errors.SpecialMember(where, f"{name} must be a plain file, has type {oct(kind)}")
    if info.compress_size != info.file_size:
        raise errors.HeaderMismatch(where, f"{name} has two sizes, {info.compress_size} and {info.file_size}")


def _check_local(data: mmap.mmap, info: zipfile.ZipInfo, position: int, end: int, where: str) -> int:
    """Compare the local header with the one that the writer makes of the directory's facts; the payload's offset."""
    name = info.filename
    if info.header_offset != position:
        kind = errors.OverlappingMembers if info.header_offset < position else errors.ExtraBytes
        raise kind(where, f"{name} must start at {position}, where the one before ends; got {info.header_offset}")
    fixed_end = position + zip_layout.LOCAL_HEADER.size
    if fixed_end + info.file_size > end:
        raise errors.OverlappingMembers(where, f"{name} with {info.file_size} bytes reaches beyond the members")
    *_, n_name, n_extra = zip_layout.LOCAL_HEADER.unpack(data[position:fixed_end])
    payload: int = fixed_end + n_name + n_extra
    if payload + info.file_size > end:
        raise errors.OverlappingMembers(where, f"{name} with {info.file_size} bytes reaches beyond the members")
    if payload % zip_layout.alignment_of(name):
        raise errors.MisalignedMember(
            where, f"{name} must start at a multiple of {zip_layout.alignment_of(name)}, got {payload}"
        )
    if zip_layout.local_header(name, position, info.file_size, info.CRC) != data[position:payload]:
        raise errors.HeaderMismatch(where, f"the local header of {name} contradicts the directory")
    return payload


def _read_manifest(data: mmap.mmap, located: list[_Located], where: str) -> Manifest:
    """Parse the manifest and compare its table with the directory, row by row."""
    last = located[-1]
    if last.nbytes > MAX_JSON_NBYTES:
        raise errors.OversizedJson(
            where, f"{MANIFEST_NAME} of at most {MAX_JSON_NBYTES} bytes is allowed, got {last.nbytes}"
        )
    text = data[last.offset : last.offset + last.nbytes]
    if zlib.crc32(text) != last.crc:
        raise errors.ChecksumMismatch(where, f"{MANIFEST_NAME} is damaged", "compile or download it again")
    manifest = parse_manifest(text, f"{where}: {MANIFEST_NAME}")
    table = {member.name: member for member in manifest.members}
    for found in located[:-1]:
        member = table.pop(found.name, None)
        if member is None:
            raise errors.UnlistedMember(where, f"{found.name} is not in the manifest")
        if (member.offset, member.nbytes) != (found.offset, found.nbytes):
            raise errors.MemberMismatch(
                where,
                f"{member.name} is {found.nbytes} bytes at {found.offset}, "
                f"the manifest says {member.nbytes} at {member.offset}",
            )
    if table:
        raise errors.MissingMember(where, f"{next(iter(table))} is in the manifest but not in the file")
    return manifest
