"""An independent writer of bundle files, straight from the ZIP specification, that can also write wrong ones.

`forge(sample_records())` gives the very bytes that `write_sample` gives; every knob breaks one thing.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bundle_samples import SMALL_MEMBERS, WEIGHTS, sample_manifest

from dsc.bundle_schema.manifest import dump_manifest


@dataclass
class Record:
    """One member, and what its headers claim where that differs from the truth."""

    name: str
    payload: bytes
    method: int = 0
    flags: int = 0
    attributes: int = 0o100644 << 16
    date: int = (1 << 5) | 1
    comment: bytes = b""
    crc: int | None = None
    nbytes: int | None = None
    packed_nbytes: int | None = None
    header_offset: int | None = None
    directory_name: str | None = None
    directory_extra: bytes = b""
    shift: int = 0
    gap: bytes = b""
    padding: bytes = b"\0"
    version: int = 20


def sample_records() -> list[Record]:
    return [*weight_records(), *(Record(name, payload) for name, payload in SMALL_MEMBERS.items())]


def weight_records(start: int = 4096) -> list[Record]:
    """The sample's tensors and their index, when the first tensor's byte lies at `start`."""
    data, lines = b"", ["sha256\tdtype\tshape\toffset\tusers"]
    for number, payload in enumerate(WEIGHTS):
        data += bytes(-len(data) % 64)
        digest, user = hashlib.sha256(payload).hexdigest(), f"target/graph.onnx:weight {number}"
        lines.append(f"{digest}\tfloat32\t{len(payload) // 4}\t{start + len(data)}\t{user}")
        data += payload
    index = "".join(f"{line}\n" for line in lines).encode()
    return [Record("weights/tensors.bin", data, version=45), Record("weights/index.tsv", index)]


def manifest_tree(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The sample's manifest as plain JSON, with this members' table."""
    return json.loads(dump_manifest(sample_manifest())) | {"members": rows}


def to_json(tree: Any) -> bytes:
    return json.dumps(tree, sort_keys=True, indent=1, ensure_ascii=False).encode() + b"\n"


def forge(
    records: list[Record],
    edit: Callable[[dict[str, Any]], object] = lambda tree: None,
    manifest: Callable[[bytes], bytes] = lambda data: data,
    manifest_record: Callable[[Record], object] = lambda record: None,
    with_manifest: bool = True,
    prefix: bytes = b"",
    suffix: bytes = b"",
    comment: bytes = b"",
    before_directory: bytes = b"",
    directory_nbytes: int | None = None,
    n_members: int | None = None,
) -> bytes:
    """The bytes of a bundle; `edit` changes the manifest's tree, `manifest` its bytes."""
    out = bytearray(prefix)
    directory = bytearray()
    rows = []
    for record in records:
        payload_offset = _append(out, directory, record)
        digest = hashlib.sha256(record.payload).hexdigest()
        row = {"name": record.name, "offset": payload_offset, "nbytes": len(record.payload), "sha256": digest}
        rows.append(row)
    if with_manifest:
        tree = manifest_tree(rows)
        edit(tree)
        last = Record("manifest.json", manifest(to_json(tree)))
        manifest_record(last)
        _append(out, directory, last)
    out += before_directory
    count = n_members if n_members is not None else len(records) + with_manifest
    size = directory_nbytes if directory_nbytes is not None else len(directory)
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, size, len(out), len(comment))
    return bytes(out + directory + end + comment + suffix)


def _append(out: bytearray, directory: bytearray, record: Record) -> int:
    """Add a member and its record of the directory; returns the payload's offset."""
    out += record.gap
    start = len(out)
    name = record.name.encode()
    is_weights = record.name == "weights/tensors.bin"
    alignment, n_sizes = (4096, 20) if is_weights else (64, 0)
    zeros = (-(start + 30 + len(name) + 6 + n_sizes)) % alignment + record.shift
    extra = struct.pack("<HHH", 0xD935, 2 + zeros, alignment) + record.padding * zeros
    crc = zlib.crc32(record.payload) if record.crc is None else record.crc
    nbytes = len(record.payload) if record.nbytes is None else record.nbytes
    packed = nbytes if record.packed_nbytes is None else record.packed_nbytes
    common = struct.pack("<5H3L", record.version, record.flags, record.method, 0, record.date, crc, packed, nbytes)
    local = common
    if is_weights:
        local = common[:-8] + b"\xff" * 8
        extra += struct.pack("<HHQQ", 1, 16, packed, nbytes)
    out += b"PK\x03\x04" + local + struct.pack("<2H", len(name), len(extra)) + name + extra
    payload_offset = len(out)
    out += record.payload
    listed = (record.directory_name or record.name).encode()
    lengths = struct.pack("<5H", len(listed), len(record.directory_extra), len(record.comment), 0, 0)
    where = struct.pack("<2L", record.attributes, start if record.header_offset is None else record.header_offset)
    directory += b"PK\x01\x02" + struct.pack("<BB", record.version, 3) + common + lengths + where + listed
    directory += record.directory_extra + record.comment
    return payload_offset
