"""The container: round trips, layout, deduplication, re-sealing, ZIP64, and what other ZIP readers see."""

import hashlib
import os
import zipfile
from pathlib import Path

import pytest
from bundle_forge import forge, sample_records
from bundle_samples import SMALL_MEMBERS, WEIGHTS, sample_manifest, write_sample
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsc.bundle_schema import zip_layout
from dsc.bundle_schema.bundle_errors import BadMemberName, ChecksumMismatch, DuplicateMember, MissingMember
from dsc.bundle_schema.container import WEIGHTS_NAME, BundleWriter, external_location, open_bundle, rewrite_members
from dsc.bundle_schema.errors import RequestError
from dsc.bundle_schema.manifest import GraphEntry, ModelEntry
from dsc.bundle_schema.tensors import DType

NAMES = st.from_regex(r"[a-z0-9]{1,8}(/[a-z0-9._-]{1,12})?", fullmatch=True).filter(
    lambda name: not {".", ".."} & set(name.split("/"))
)


def bare_manifest():
    """A manifest that uses no member, so that any set of members fits it."""
    manifest = sample_manifest()
    target = ModelEntry(info=manifest.target.info, graphs=())
    return manifest.model_copy(update={"target": target, "tokenizer": type(manifest.tokenizer)()})


def test_what_is_written_is_read(tmp_path: Path):
    path = tmp_path / "sample.dsmodel"
    sealed = write_sample(path)
    with open_bundle(path) as bundle:
        assert bundle.manifest == sealed
        for name, payload in SMALL_MEMBERS.items():
            assert bundle.read(name) == payload
        tensors = bundle.weights()
        for index, (payload, tensor) in enumerate(zip(WEIGHTS, tensors, strict=True)):
            assert bundle.map[tensor.offset : tensor.offset + tensor.nbytes] == payload
            assert tensor.sha256 == hashlib.sha256(payload).hexdigest()
            assert (tensor.shape, tensor.users) == ((len(payload) // 4,), (f"target/graph.onnx:weight {index}",))
        bundle.verify()
    assert sorted(os.listdir(tmp_path)) == ["sample.dsmodel"]


def test_an_independent_writer_makes_the_same_bytes(tmp_path: Path):
    write_sample(tmp_path / "a.dsmodel")
    assert (tmp_path / "a.dsmodel").read_bytes() == forge(sample_records())


def test_payloads_lie_where_the_manifest_says_and_are_aligned(tmp_path: Path):
    path = tmp_path / "sample.dsmodel"
    members = write_sample(path).members
    data = path.read_bytes()
    for member in members:
        assert hashlib.sha256(data[member.offset : member.offset + member.nbytes]).hexdigest() == member.sha256
        assert member.offset % (4096 if member.name == WEIGHTS_NAME else 64) == 0


def test_other_zip_readers_agree(tmp_path: Path):
    path = tmp_path / "sample.dsmodel"
    members = write_sample(path).members
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == [member.name for member in members] + ["manifest.json"]
        for name, payload in SMALL_MEMBERS.items():
            assert archive.read(name) == payload


def test_equal_tensors_are_stored_once(tmp_path: Path):
    path = tmp_path / "tied.dsmodel"
    payload = os.urandom(200_000)
    with BundleWriter(path) as writer:
        first = writer.add_weight(payload, DType.FLOAT32, (50_000,), ("a.onnx", "x"))
        halves = [payload[:1000], memoryview(payload)[1000:]]
        second = writer.add_weight(halves, DType.INT8, (200, 1000), ("b.onnx", "naïve\t\\n\n"))
        writer.seal(bare_manifest())
    assert first == second
    with open_bundle(path) as bundle:
        assert [weight.users for weight in bundle.weights()] == [("a.onnx:x", "b.onnx:naïve\t\\n\n")]
    assert path.stat().st_size <= len(payload) * 1.02 + 8192


def test_the_file_exceeds_its_tensors_by_two_percent_at_most(tmp_path: Path):
    path = tmp_path / "weights.dsmodel"
    payloads = [bytes([index]) * (40_000 + index) for index in range(100)]
    with BundleWriter(path) as writer:
        for index, payload in enumerate(payloads):
            user = ("target/graph.onnx", f"model.layers.{index}.self_attn.q_proj.weight")
            writer.add_weight(payload, DType.UINT8, (len(payload),), user)
        writer.seal(bare_manifest())
    assert path.stat().st_size <= 1.02 * sum(map(len, payloads))


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(members=st.dictionaries(NAMES, st.binary(max_size=9000), max_size=8))
def test_any_members_round_trip(tmp_path: Path, members: dict[str, bytes]):
    path = tmp_path / "any.dsmodel"
    members.pop("manifest.json", None)
    with BundleWriter(path) as writer:
        for name, payload in members.items():
            half = len(payload) // 2
            writer.add(name, iter([payload[:half], payload[half:]]), nbytes=len(payload))
        writer.seal(bare_manifest())
    with open_bundle(path) as bundle:
        bundle.verify()
        assert {name: bundle.read(name) for name in bundle.members} == members


def test_resealing_gives_the_bytes_of_a_fresh_compile(tmp_path: Path):
    changed, fresh = tmp_path / "changed.dsmodel", tmp_path / "fresh.dsmodel"
    before = write_sample(changed)
    new = {"dflash_config.json": b'{"window": 8}' * 100}
    after = rewrite_members(changed, new)
    write_sample(fresh, new)
    assert changed.read_bytes() == fresh.read_bytes()
    weights = [member for member in before.members if member.name.startswith("weights/")]
    assert len(weights) == 2
    assert weights == list(after.members[:2])


def test_resealing_follows_a_link_and_keeps_it(tmp_path: Path):
    real, link = tmp_path / "blob", tmp_path / "model.dsmodel"
    write_sample(real)
    link.symlink_to(real)
    rewrite_members(link, {"card.md": b"new"})
    assert link.is_symlink()
    assert open_bundle(real).read("card.md") == b"new"


def test_resealing_refuses_unknown_names_and_damage(tmp_path: Path):
    path = tmp_path / "sample.dsmodel"
    write_sample(path)
    with pytest.raises(MissingMember, match="no member is named nothing"):
        rewrite_members(path, {"nothing": b""})
    data = bytearray(path.read_bytes())
    data[open_bundle(path).manifest.members[0].offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(ChecksumMismatch, match="weights/"):
        rewrite_members(path, {"card.md": b"new"})
    assert path.read_bytes() == data
    assert os.listdir(tmp_path) == ["sample.dsmodel"]


def test_an_open_bundle_outlives_its_replacement(tmp_path: Path):
    path = tmp_path / "sample.dsmodel"
    write_sample(path)
    with open_bundle(path) as old:
        view = old.view("card.md")
        rewrite_members(path, {"kv_plan.json": b"x"})
        assert old.read("kv_plan.json") == SMALL_MEMBERS["kv_plan.json"]
        assert open_bundle(path).identity != old.identity
    assert bytes(view) == b""


BAD_NAMES = ["/etc/passwd", "../up", "a/../b", "a\\b", "a//b", "./a", "é", "a b", "", "a/", "x" * 256]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_the_writer_refuses_bad_names(tmp_path: Path, name: str):
    with BundleWriter(tmp_path / "x.dsmodel") as writer, pytest.raises(BadMemberName):
        writer.add(name, b"")
    assert os.listdir(tmp_path) == []


def test_the_writer_refuses_a_name_twice_and_a_wrong_size(tmp_path: Path):
    with BundleWriter(tmp_path / "x.dsmodel") as writer:
        writer.add("a", b"1")
        with pytest.raises(DuplicateMember):
            writer.add("a", b"2")
        with pytest.raises(DuplicateMember):
            writer.add("manifest.json", b"2")
        with pytest.raises(ValueError, match="3 bytes were announced, got 2"):
            writer.add("b", iter([b"12"]), nbytes=3)


def test_the_writer_refuses_weights_after_other_members_and_sizes_that_are_wrong(tmp_path: Path):
    user = ("target/graph.onnx", "w")
    with (
        BundleWriter(tmp_path / "x.dsmodel") as writer,
        pytest.raises(ValueError, match=r"float32 \[2\] takes 8 bytes, got 4"),
    ):
        writer.add_weight(b"1234", DType.FLOAT32, (2,), user)
    with BundleWriter(tmp_path / "x.dsmodel") as writer:
        writer.add("card.md", b"1")
        with pytest.raises(ValueError, match=r"weights come first, card\.md was written"):
            writer.add_weight(b"1234", DType.FLOAT32, (1,), user)
    assert os.listdir(tmp_path) == []


def test_bad_places_are_the_users_error(tmp_path: Path):
    with pytest.raises(RequestError, match="folder does not exist"), BundleWriter(tmp_path / "no" / "x.dsmodel"):
        pass
    with pytest.raises(RequestError, match="got a folder"), BundleWriter(tmp_path):
        pass
    with pytest.raises(RequestError, match="cannot be opened"):
        open_bundle(tmp_path / "missing.dsmodel")
    with pytest.raises(RequestError, match=r"a \.dsmodel file is required"):
        open_bundle(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RequestError, match=r"a \.dsmodel file is required"):
        open_bundle(tmp_path / "pipe")


def test_an_error_in_the_block_leaves_the_old_file(tmp_path: Path):
    path = tmp_path / "sample.dsmodel"
    write_sample(path)
    old = path.read_bytes()

    def broken_payload():
        yield b"some"
        raise KeyError("the model went away")

    with pytest.raises(KeyError), BundleWriter(path) as writer:
        writer.add("a", broken_payload(), nbytes=100)
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["sample.dsmodel"]


def test_zip64_headers_appear_where_they_must_and_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Limits of gigabytes lowered to bytes: sizes and offsets beyond them take the ZIP64 form.
    monkeypatch.setattr(zip_layout, "ZIP64_FROM", 1000)
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 1100)
    path = tmp_path / "large.dsmodel"
    write_sample(path)
    data = path.read_bytes()
    assert b"PK\x06\x06" in data
    assert b"PK\x06\x07" in data
    with open_bundle(path) as bundle:
        bundle.verify()
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


@pytest.mark.slow
def test_a_member_beyond_four_gigabytes(tmp_path: Path):
    path = tmp_path / "huge.dsmodel"
    chunk = bytes(2**24)
    with BundleWriter(path) as writer:
        writer.add_weight([chunk] * 257, DType.UINT8, (257, 2**24), ("target/graph.onnx", "huge"))
        writer.add("after.json", b"{}")
        writer.seal(bare_manifest())
    with open_bundle(path) as bundle:
        assert bundle.read("after.json") == b"{}"
        bundle.verify()


@given(st.text(min_size=1, max_size=120).filter(lambda text: not {"/", "\0"} & set(text) and text not in (".", "..")))
def test_external_locations_have_one_length_and_name_the_file(name: str):
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError:
        return
    if len(encoded) > 254:
        return
    location = os.fsencode(external_location(name))
    assert len(location) == 256
    assert os.path.normpath(location) == encoded
    assert not location.startswith(b"/")


@pytest.mark.parametrize("length", [1, 2, 253, 254])
def test_external_location_at_the_ends_of_the_range(tmp_path: Path, length: int):
    name = "n" * length
    (tmp_path / name).write_text("here")
    assert (tmp_path / external_location(name)).read_text() == "here"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "n" * 255, "a\0b"])
def test_external_location_refuses_what_is_no_file_name(name: str):
    with pytest.raises(RequestError):
        external_location(name)


def test_a_manifest_must_not_use_missing_members(tmp_path: Path):
    manifest = sample_manifest()
    assert isinstance(manifest.target.graphs[0], GraphEntry)
    with BundleWriter(tmp_path / "x.dsmodel") as writer:
        writer.add("card.md", b"")
        with pytest.raises(ValueError, match=r"target/graph\.onnx is used but is not in the members' table"):
            writer.seal(manifest)
    assert os.listdir(tmp_path) == []
