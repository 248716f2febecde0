"""Every way in which a bundle file can be wrong has its own error, and none is read past its check."""

import os
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bundle_forge import Record, forge, sample_records
from bundle_samples import write_sample

from dsc.bundle_schema import bundle_errors as errors
from dsc.bundle_schema.bundle_reader import MAX_DIRECTORY_NBYTES
from dsc.bundle_schema.container import open_bundle
from dsc.bundle_schema.errors import BundleError


def with_record(**changes: Any) -> Callable[[], bytes]:
    """The sample with one more member, ``extra.bin``, forged as `changes` say."""
    fields = {"name": "extra.bin", "payload": b"harmless"} | changes
    return lambda: forge([*sample_records(), Record(**fields)])


def with_manifest(edit: Callable[[dict[str, Any]], object]) -> Callable[[], bytes]:
    return lambda: forge(sample_records(), edit=edit)


def with_json(manifest: Callable[[bytes], bytes]) -> Callable[[], bytes]:
    return lambda: forge(sample_records(), manifest=manifest)


def bomb() -> bytes:
    packer = zlib.compressobj(9, wbits=-15)
    packed = packer.compress(bytes(2**24)) + packer.flush()
    return with_record(payload=packed, method=8, nbytes=2**24, packed_nbytes=len(packed), crc=0)()


def polyglot() -> bytes:
    return b"#!/bin/sh\nexit 1\n" + forge(sample_records())


def crowded_directory() -> bytes:
    """As many records as the directory's limit allows, all for one byte range."""
    record = b"PK\x01\x02" + struct.pack(
        "<BB5H3L5H2L", 20, 3, 20, 0, 0, 0, 33, 0, 0, 0, 1, 0, 0, 0, 0, 0o100644 << 16, 0
    )
    n_members = MAX_DIRECTORY_NBYTES // (len(record) + 1)
    head = b"PK\x03\x04" + bytes(60)
    nbytes = n_members * (len(record) + 1)
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, n_members, n_members, nbytes, len(head), 0)
    return head + (record + b"a") * n_members + end


STRUCTURE = {
    "crowded directory": (crowded_directory, errors.MisalignedMember),
    "empty": (lambda: b"", errors.NotABundle),
    "other format": (lambda: b"\x7fELF" + bytes(1000), errors.NotABundle),
    "leading bytes": (polyglot, errors.NotABundle),
    "only the magic": (lambda: b"PK\x03\x04", errors.TruncatedBundle),
    "empty zip": (lambda: b"PK\x05\x06" + bytes(18), errors.NotABundle),
    "trailing bytes": (lambda: forge(sample_records(), suffix=b"x"), errors.ExtraBytes),
    "many trailing bytes": (lambda: forge(sample_records(), suffix=bytes(60000)), errors.ExtraBytes),
    "comment": (lambda: forge(sample_records(), comment=b"hello"), errors.ExtraBytes),
    "hole before a member": (with_record(gap=b"hidden"), errors.ExtraBytes),
    "hole before the directory": (lambda: forge(sample_records(), before_directory=b"hidden"), errors.ExtraBytes),
    "directory size too large": (lambda: forge(sample_records(), directory_nbytes=2**31), errors.OversizedDirectory),
    "directory size wrong": (lambda: forge(sample_records(), directory_nbytes=100), errors.HeaderMismatch),
    "member count wrong": (lambda: forge(sample_records(), n_members=3), errors.HeaderMismatch),
    "no manifest": (lambda: forge(sample_records(), with_manifest=False), errors.MissingMember),
    "manifest not last": (
        lambda: forge([Record("manifest.json", b"{}"), *sample_records()], with_manifest=False),
        errors.MissingMember,
    ),
    "absolute path": (with_record(name="/etc/passwd"), errors.BadMemberName),
    "climbing path": (with_record(name="a/../../b"), errors.BadMemberName),
    "backslash": (with_record(name="a\\b"), errors.BadMemberName),
    "drive letter": (with_record(name="c:file"), errors.BadMemberName),
    "control character": (with_record(name="a\nb"), errors.BadMemberName),
    "zero in a name": (with_record(name="a\0b"), errors.BadMemberName),
    "folder": (with_record(name="folder/", payload=b""), errors.BadMemberName),
    "empty name": (with_record(name=""), errors.BadMemberName),
    "duplicate": (with_record(name="card.md"), errors.DuplicateMember),
    "two manifests": (with_record(name="manifest.json"), errors.DuplicateMember),
    "case twin": (with_record(name="CARD.md"), errors.CaseTwinMember),
    "symbolic link": (with_record(payload=b"/etc/passwd", attributes=0o120777 << 16), errors.SpecialMember),
    "device": (with_record(attributes=0o020666 << 16), errors.SpecialMember),
    "folder by mode": (with_record(attributes=0o040755 << 16), errors.SpecialMember),
    "no mode": (with_record(attributes=0), errors.SpecialMember),
    "executable": (with_record(attributes=0o100755 << 16), errors.HeaderMismatch),
    "encrypted": (with_record(flags=1), errors.EncryptedMember),
    "data descriptor": (with_record(flags=8), errors.HeaderMismatch),
    "utf-8 flag": (with_record(flags=0x800), errors.HeaderMismatch),
    "compressed": (with_record(method=8), errors.CompressedMember),
    "bomb": (bomb, errors.CompressedMember),
    "unknown method": (with_record(method=99), errors.CompressedMember),
    "sizes differ": (with_record(packed_nbytes=7), errors.HeaderMismatch),
    "size too large": (with_record(nbytes=2**31 - 1), errors.OverlappingMembers),
    "size beyond the members": (with_record(nbytes=5000), errors.OverlappingMembers),
    "size reaching the next": (with_record(nbytes=9), errors.OverlappingMembers),
    "size too small": (with_record(nbytes=3), errors.ExtraBytes),
    "shared bytes": (with_record(header_offset=0), errors.OverlappingMembers),
    "offset outside": (with_record(header_offset=2**31), errors.ExtraBytes),
    "local name differs": (with_record(directory_name="other.bin"), errors.HeaderMismatch),
    "clock": (with_record(date=(45 << 9) | (1 << 5) | 1), errors.HeaderMismatch),
    "member comment": (with_record(comment=b"hello"), errors.HeaderMismatch),
    "foreign version": (with_record(version=63), errors.HeaderMismatch),
    "too new a version": (with_record(version=250), errors.HeaderMismatch),
    "extra field": (with_record(directory_extra=b"\x99\x99\x02\x00hi"), errors.HeaderMismatch),
    "broken extra field": (with_record(directory_extra=b"\x01\x00\xff\x00hi"), errors.HeaderMismatch),
    "padding with content": (with_record(padding=b"x"), errors.HeaderMismatch),
    "misaligned": (with_record(shift=1), errors.MisalignedMember),
    "padded by a whole block": (with_record(shift=64), errors.HeaderMismatch),
}


def _set(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(tree: dict[str, Any]) -> None:
        node: Any = tree
        for part in path[:-1]:
            node = node[part]
        node[path[-1]] = value

    return edit


def _nested(data: bytes, depth: int) -> bytes:
    return data.replace(b'"recipe": {', b'"recipe": {"deep": ' + b"[" * depth + b"]" * depth + b",", 1)


MANIFEST = {
    "not json": (with_json(lambda data: data[:-3]), errors.MalformedJson),
    "empty": (with_json(lambda data: b""), errors.MalformedJson),
    "not utf-8": (with_json(lambda data: data.replace(b"sample", b"samp\xff\xfe")), errors.MalformedJson),
    "utf-16": (with_json(lambda data: data.decode().encode("utf-16")), errors.MalformedJson),
    "a list": (with_json(lambda data: b"[]"), errors.UnsupportedSchema),
    "duplicate key": (with_json(lambda data: data.replace(b"{", b'{"name": "x",', 1)), errors.DuplicateKey),
    "deep nesting": (with_json(lambda data: _nested(data, 200_000)), errors.OversizedJson),
    "nesting": (with_json(lambda data: _nested(data, 20_000)), errors.MalformedJson),
    "some nesting": (with_json(lambda data: _nested(data, 500)), errors.MalformedJson),
    "nan": (with_json(lambda data: data.replace(b"0.1,", b"NaN,").replace(b"0.1\n", b"NaN\n")), errors.MalformedJson),
    "infinite": (with_json(lambda data: data.replace(b'"ratio": 0.1', b'"ratio": 1e999')), errors.MalformedJson),
    "long number": (
        with_json(lambda data: data.replace(b'"ratio": 0.1', b'"ratio": ' + b"9" * 10_000)),
        errors.MalformedJson,
    ),
    "too many objects": (with_manifest(_set("recipe", value={"x": [{}] * 20_000})), errors.OversizedJson),
    "too many keys": (with_manifest(_set("recipe", value=dict.fromkeys(map(str, range(1025))))), errors.OversizedJson),
    "too many values": (with_manifest(_set("recipe", value=[0] * 200_000)), errors.OversizedJson),
    "too many bytes": (with_manifest(_set("recipe", value={"x": "y" * 2**22})), errors.OversizedJson),
    "unknown field": (with_manifest(_set("surprise", value=1)), errors.InvalidField),
    "unknown nested field": (with_manifest(_set("target", "info", "surprise", value=1)), errors.InvalidField),
    "missing field": (with_manifest(lambda tree: tree.pop("target")), errors.InvalidField),
    "wrong type": (with_manifest(_set("name", value=7)), errors.InvalidField),
    "number as text": (with_manifest(_set("members", 0, "offset", value="4096")), errors.InvalidField),
    "negative size": (with_manifest(_set("members", 0, "nbytes", value=-1)), errors.InvalidField),
    "negative offset": (with_manifest(_set("members", 0, "offset", value=-4096)), errors.InvalidField),
    "huge size": (with_manifest(_set("members", 0, "nbytes", value=10**18)), errors.InvalidField),
    "fractional size": (with_manifest(_set("members", 0, "nbytes", value=1e18)), errors.InvalidField),
    "zero layers": (with_manifest(_set("target", "info", "n_layers", value=0)), errors.InvalidField),
    "huge axis": (with_manifest(_set("target", "graphs", 0, "inputs", 0, "axes", value=[10**18])), errors.InvalidField),
    "negative axis": (with_manifest(_set("target", "graphs", 0, "inputs", 0, "axes", value=[-1])), errors.InvalidField),
    "hash of another form": (with_manifest(_set("members", 0, "sha256", value="00")), errors.InvalidField),
    "weights without an index": (lambda: forge(sample_records()[:1] + sample_records()[2:]), errors.InvalidField),
    "an index without weights": (lambda: forge(sample_records()[1:]), errors.InvalidField),
    "graph that is not there": (
        with_manifest(_set("target", "graphs", 0, "member", value="target/other.onnx")),
        errors.InvalidField,
    ),
    "draft without a model": (with_manifest(_set("draft", "kind", value="model")), errors.InvalidField),
    "unknown draft kind": (with_manifest(_set("draft", "kind", value="magic")), errors.InvalidField),
    "member moved": (with_manifest(_set("members", 3, "offset", value=64)), errors.MemberMismatch),
    "member resized": (with_manifest(_set("members", 3, "nbytes", value=12)), errors.MemberMismatch),
    "member listed twice": (
        with_manifest(lambda tree: tree["members"].append(tree["members"][-1])),
        errors.InvalidField,
    ),
    "member not listed": (with_manifest(lambda tree: tree["members"].pop()), errors.UnlistedMember),
    "member not there": (
        with_manifest(lambda tree: tree["members"].append(dict(tree["members"][-1], name="ghost"))),
        errors.MissingMember,
    ),
    "wrong checksum": (
        lambda: forge(sample_records(), manifest_record=lambda record: setattr(record, "crc", 1)),
        errors.ChecksumMismatch,
    ),
}


@pytest.mark.parametrize("name", STRUCTURE)
def test_structure(name: str, tmp_path: Path):
    check_refused(*STRUCTURE[name], tmp_path)


@pytest.mark.parametrize("name", MANIFEST)
def test_manifest(name: str, tmp_path: Path):
    check_refused(*MANIFEST[name], tmp_path)


def check_refused(make: Callable[[], bytes], kind: type[BundleError], folder: Path) -> None:
    path = folder / "bad.dsmodel"
    path.write_bytes(make())
    tracemalloc.start()
    try:
        with pytest.raises(BundleError) as caught:
            open_bundle(path)
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()
    assert type(caught.value) is kind, caught.value
    assert caught.value.where.startswith(str(path))
    assert len(str(caught.value)) < 600
    assert os.listdir(folder) == ["bad.dsmodel"]


INDEX = {
    "no header": lambda index: index.partition(b"\n")[2],
    "empty": lambda index: b"",
    "cut line": lambda index: index[:-1],
    "zero tensors": lambda index: index.partition(b"\n")[0] + b"\n",
    "one tensor missing": lambda index: index[: index.rindex(b"\n", 0, -1) + 1],
    "one tensor twice": lambda index: index + index[index.rindex(b"\n", 0, -1) + 1 :],
    "negative dimension": lambda index: index.replace(b"\t301\t", b"\t-301\t"),
    "zero dimension": lambda index: index.replace(b"\t301\t", b"\t0\t"),
    "huge dimension": lambda index: index.replace(b"\t301\t", b"\t9999999999999999\t"),
    "too many digits": lambda index: index.replace(b"\t301\t", b"\t" + b"9" * 5000 + b"\t"),
    "too many axes": lambda index: index.replace(b"\t301\t", b"\t" + b"1x" * 5000 + b"301\t"),
    "another dtype": lambda index: index.replace(b"float32", b"float16", 1),
    "unknown dtype": lambda index: index.replace(b"float32", b"complex7", 1),
    "moved": lambda index: index.replace(b"\t4096\t", b"\t4160\t"),
    "overlapping": lambda index: index.replace(b"\t5312\t", b"\t5248\t"),
    "hash of another form": lambda index: index.replace(b"\n", b"\nX", 1),
    "one hash twice": lambda index: (lambda lines: b"\n".join([*lines[:2], lines[1][:64] + lines[2][64:], b""]))(
        index.split(b"\n")
    ),
    "not ascii": lambda index: index.replace(b"weight 0", b"weight \xff"),
    "digits of another script": lambda index: index.replace(b"\t301\t", "\t٣٠١\t".encode()),
    "control character": lambda index: index.replace(b"weight 0", b"weight \x07"),
    "carriage return": lambda index: index.replace(b"\n", b"\r\n"),
    "too long": lambda index: index + b"\n" * 2**23,
}


@pytest.mark.parametrize("name", INDEX)
def test_index_of_the_weights(name: str, tmp_path: Path):
    records = sample_records()
    records[1].payload = INDEX[name](records[1].payload)
    path = tmp_path / "bad.dsmodel"
    path.write_bytes(forge(records))
    with open_bundle(path) as bundle:
        bundle.verify()
        tracemalloc.start()
        try:
            with pytest.raises(errors.BadWeightIndex) as caught:
                bundle.weights()
            assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
        finally:
            tracemalloc.stop()
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < 600


def test_another_major_says_who_wrote_it_and_what_to_do(tmp_path: Path):
    def from_the_future(tree: dict[str, Any]) -> None:
        tree |= {"schema_version": "2.0", "shape of things": "to come"}
        tree["created_by"]["dsc"] = "7.5.3"

    path = tmp_path / "new.dsmodel"
    path.write_bytes(forge(sample_records(), edit=from_the_future))
    with pytest.raises(
        errors.UnsupportedSchema, match=r"written by dsc 7\.5\.3 .* this dsc reads schema 1\.x \(upgrade"
    ):
        open_bundle(path)
    path.write_bytes(forge(sample_records(), edit=_set("schema_version", value="0.9")))
    with pytest.raises(errors.UnsupportedSchema, match=r"compile the model again"):
        open_bundle(path)


@pytest.mark.parametrize("version", ["", "1", "1.x", "1.0.0", "-1.0", "9" * 5000 + ".0", "١.٠", 1.0, None, {"a": 1}])
def test_versions_of_no_known_form(version: Any, tmp_path: Path):
    path = tmp_path / "odd.dsmodel"
    path.write_bytes(forge(sample_records(), edit=_set("schema_version", value=version)))
    with pytest.raises(errors.UnsupportedSchema):
        open_bundle(path)


def test_a_newer_minor_is_tolerated_with_what_it_adds(tmp_path: Path):
    def newer(tree: dict[str, Any]) -> None:
        tree |= {"schema_version": "1.99", "addition": [1, 2]}
        tree["target"]["info"]["addition"] = {"deep": None}

    path = tmp_path / "newer.dsmodel"
    path.write_bytes(forge(sample_records(), edit=newer))
    with open_bundle(path) as bundle:
        assert bundle.manifest.schema_version == "1.99"
        bundle.verify()
    path.write_bytes(forge(sample_records(), edit=lambda tree: (newer(tree), tree.pop("name"))))
    with pytest.raises(errors.InvalidField, match="name"):
        open_bundle(path)


def test_the_forger_can_write_a_good_bundle(tmp_path: Path):
    path = tmp_path / "good.dsmodel"
    path.write_bytes(with_record()())
    with open_bundle(path) as bundle:
        bundle.verify()
        assert bundle.read("extra.bin") == b"harmless"


def test_truncation_anywhere_is_refused(tmp_path: Path):
    good, bad = tmp_path / "good.dsmodel", tmp_path / "bad.dsmodel"
    members = write_sample(good).members
    data = good.read_bytes()
    boundaries = {edge for member in members for edge in (member.offset, member.offset + member.nbytes)}
    for length in sorted(boundaries | set(range(0, len(data), 131)) | set(range(len(data) - 300, len(data)))):
        bad.write_bytes(data[:length])
        with pytest.raises(BundleError):
            open_bundle(bad)


def test_a_flipped_byte_in_any_member_is_found(tmp_path: Path):
    good, bad = tmp_path / "good.dsmodel", tmp_path / "bad.dsmodel"
    members = [member for member in write_sample(good).members if member.nbytes]
    data = good.read_bytes()
    for member in members:
        for position in {member.offset, member.offset + member.nbytes // 2, member.offset + member.nbytes - 1}:
            flipped = bytearray(data)
            flipped[position] ^= 0x10
            bad.write_bytes(flipped)
            with open_bundle(bad) as bundle, pytest.raises(errors.ChecksumMismatch, match=member.name):
                bundle.verify()
            with open_bundle(bad) as bundle:
                bundle.verify([other.name for other in members if other != member])


def is_refused(path: Path) -> bool:
    """Opening or verifying finds something wrong."""
    try:
        with open_bundle(path) as bundle:
            bundle.verify()
    except BundleError:
        return True
    return False


def check_flips(folder: Path, step: int) -> None:
    path = folder / "flipped.dsmodel"
    write_sample(path)
    data = path.read_bytes()
    with path.open("r+b", buffering=0) as file:
        for position in range(0, len(data), step):
            os.pwrite(file.fileno(), bytes([data[position] ^ (1 << position % 8)]), position)
            assert is_refused(path), f"the flipped bit in byte {position} was not found"
            os.pwrite(file.fileno(), data[position : position + 1], position)


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path):
    check_flips(tmp_path, 61)


@pytest.mark.slow
def test_a_flipped_bit_in_every_byte_is_found(tmp_path: Path):
    check_flips(tmp_path, 1)
