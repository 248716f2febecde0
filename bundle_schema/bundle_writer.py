"""Writing a bundle: streamed, deterministic, and there only when it is whole.

Everything goes to a temporary file in the target's folder, which replaces the target in one step after it
was flushed to the disk. The temporary file is locked while its writer lives, so the next writer of the
same target can tell what a killed one left behind and removes just that.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

from dsc.bundle_schema import zip_layout
from dsc.bundle_schema.bundle_errors import ChecksumMismatch, DiskFull, DuplicateMember, MissingMember
from dsc.bundle_schema.bundle_reader import open_bundle
from dsc.bundle_schema.errors import HostError, RequestError
from dsc.bundle_schema.manifest import MANIFEST_NAME, Manifest, Member, dump_manifest
from dsc.bundle_schema.tensors import DType
from dsc.bundle_schema.weight_index import INDEX_NAME, StoredTensor
from dsc.bundle_schema.weight_region import Buffer, Payload, WeightRegion, chunks
from dsc.bundle_schema.zip_layout import WEIGHTS_NAME

_NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class BundleWriter:
    """Writes the members of one bundle in the order in which they are added.

    Weights come first, so that graphs, which name their offsets, can be serialised after them::

        with BundleWriter(path) as writer:
            weight = writer.add_weight(tensor_bytes, dtype, shape, user)
            writer.add("target/graph.onnx", graph_naming(weight.offset))
            writer.seal(manifest)

    Leaving the block without `seal` leaves nothing behind, and an older file at `path` as it was.

    Args:
        path: the bundle to write. A symbolic link is followed.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(os.path.realpath(path))
        zip_layout.external_location(self.path.name)
        self._members: dict[str, Member] = {}
        self._weights: WeightRegion | None = None

    def __enter__(self) -> Self:
        if self.path.is_dir():
            raise RequestError(str(self.path), "a file name is required, got a folder")
        with _disk_errors(self.path):
            remove_leftovers(self.path)
            self._temporary, self._file = _create_locked(self.path)
        self._zip = zipfile.ZipFile(self._file, "w", zipfile.ZIP_STORED)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file.closed:
            return
        # Closing writes the ZIP directory: it may fail once more for want of room, and nothing depends on it.
        closing = [self._zip.close, self._file.close]
        if self._weights is not None:
            closing.insert(0, self._weights.abandon)
        for close in closing:
            with suppress(OSError, ValueError, RuntimeError):
                close()
        self._temporary.unlink(missing_ok=True)

    def add(self, name: str, payload: Payload, nbytes: int | None = None) -> Member:
        """Write one member.

        Args:
            name: its name, e.g. ``target/graph.onnx``.
            payload: a buffer, or buffers one after the other.
            nbytes: the payload's size; required when `payload` is not a buffer.

        Returns:
            Its row of the members' table; `offset` is the payload's place in the file.

        Raises:
            BadMemberName, DuplicateMember: the name cannot be used.
            DiskFull: there is no room; nothing is left at the target but what was there.
        """
        where = str(self.path)
        zip_layout.check_name(name, where)
        if name in self._members or name == MANIFEST_NAME:
            raise DuplicateMember(where, f"{name} must be written once")
        self._close_weights()
        return self._write(name, payload, _size_of(payload, nbytes))

    def add_weight(
        self, payload: Buffer | Collection[Buffer], dtype: DType, shape: tuple[int, ...], user: tuple[str, str]
    ) -> StoredTensor:
        """Write a tensor, or find it when one with the same bytes was written.

        Weights come before every other member.

        Args:
            payload: a buffer, or buffers that can be iterated twice: once to hash, once to write.
            dtype: its type; `shape` its sizes.
            user: the graph's member and the initializer's name there.

        Returns:
            What is stored, which may have another shape or type of the same bytes.

        Raises:
            DiskFull: there is no room; nothing is left at the target but what was there.
        """
        if self._members:
            raise ValueError(f"weights come first, {next(iter(self._members))} was written already")
        with _disk_errors(self.path):
            if self._weights is None:
                self._weights = WeightRegion(self._zip, self._file)
            return self._weights.add(payload, dtype, shape, user)

    @property
    def weights_nbytes(self) -> int:
        """Bytes of the tensors once another member was written; 0 when there are none."""
        member = self._members.get(WEIGHTS_NAME)
        return member.nbytes if member is not None else 0

    def _close_weights(self) -> None:
        """Complete the weights and write their index, once."""
        if self._weights is None:
            return
        with _disk_errors(self.path):
            weights, self._weights = self._weights, None
            self._members[WEIGHTS_NAME] = weights.close()
        index = weights.index()
        self._write(INDEX_NAME, index, len(index))

    def seal(self, manifest: Manifest) -> Manifest:
        """Write the manifest as the last member and put the bundle in its place.

        Args:
            manifest: complete but for its members' table, which is filled in here.

        Returns:
            The manifest as written.
        """
        self._close_weights()
        fields = {name: getattr(manifest, name) for name in type(manifest).model_fields}
        sealed = Manifest(**fields | {"members": tuple(self._members.values())})
        data = dump_manifest(sealed)
        self._write(MANIFEST_NAME, data, len(data))
        with _disk_errors(self.path):
            self._zip.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            os.replace(self._temporary, self.path)
            self._file.close()
            _sync_folder(self.path.parent)
        return sealed

    def _write(self, name: str, payload: Payload, nbytes: int) -> Member:
        info = zip_layout.member_info(name, self._file.tell(), nbytes)
        digest = hashlib.sha256()
        zip64 = zip_layout.has_zip64(name, nbytes)
        with _disk_errors(self.path), self._zip.open(info, "w", force_zip64=zip64) as stream:
            offset = self._file.tell()
            for chunk in chunks(payload):
                digest.update(chunk)
                stream.write(chunk)
        info.extra = b""  # padding belongs to the local header; the directory at the end does without
        if info.file_size != nbytes:
            raise ValueError(f"{name}: {nbytes} bytes were announced, got {info.file_size}")
        self._members[name] = Member(name=name, offset=offset, nbytes=nbytes, sha256=digest.hexdigest())
        return self._members[name]


def rewrite_members(path: Path | str, changes: Mapping[str, bytes], output: Path | str | None = None) -> Manifest:
    """Replace small members of a bundle and seal it again; weights keep their bytes and offsets.

    Args:
        path: the bundle.
        changes: member name -> new content. The names must be there already.
        output: where the result goes; over the bundle itself when None.

    Returns:
        The new manifest.

    Raises:
        MissingMember: a name is not in the bundle.
        ChecksumMismatch: a member that is kept is damaged; the file stays as it is.
    """
    with open_bundle(path) as bundle, BundleWriter(path if output is None else output) as writer:
        if unknown := sorted(set(changes) - set(bundle.members)):
            raise MissingMember(str(path), f"no member is named {unknown[0]}", "see `dsc inspect`")
        for member in bundle.members.values():
            new = changes.get(member.name)
            written = writer.add(member.name, bundle.view(member.name) if new is None else new)
            if new is None and written.sha256 != member.sha256:
                raise ChecksumMismatch(str(path), f"{member.name} is damaged", "compile or download again")
        return writer.seal(bundle.manifest)


def remove_leftovers(path: Path) -> list[Path]:
    """Remove temporary files of `path` whose writers were killed; those of living writers stay.

    Returns:
        What was removed.
    """
    removed = []
    for candidate in path.parent.glob(_temporary_name(path, "*")):
        try:
            descriptor = os.open(candidate, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue  # gone meanwhile, a link, or not ours to touch
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            candidate.unlink()
            removed.append(candidate)
        except OSError:
            continue  # its writer lives
        finally:
            os.close(descriptor)
    return removed


def temporary_path(path: Path) -> Path:
    """A new name beside `path` that `remove_leftovers` recognises unless its file is locked."""
    return path.parent / _temporary_name(path, f"{os.getpid()}-{secrets.token_hex(4)}")


def _temporary_name(path: Path, unique: str) -> str:
    digest = hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]
    return f".dsc-{digest}-{unique}.tmp"


def _create_locked(path: Path) -> tuple[Path, BinaryIO]:
    while True:
        temporary = temporary_path(path)
        file = os.fdopen(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666), "w+b")
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        # Between creation and lock another writer may have taken it for a leftover: then try again.
        if os.fstat(file.fileno()).st_nlink:
            return temporary, file
        file.close()


def _size_of(payload: Payload, nbytes: int | None) -> int:
    if isinstance(payload, bytes | bytearray | memoryview):
        return memoryview(payload).nbytes
    if nbytes is None:
        raise ValueError("nbytes is required when the payload is not one buffer")
    return nbytes


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system says into an error that a user can act on."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise DiskFull(str(path), f"no room to write it: {error.strerror}", "free some space") from error
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise RequestError(str(path), "its folder does not exist", "create it first") from error
        raise HostError(str(path), f"cannot be written: {error.strerror}") from error
