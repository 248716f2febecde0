"""What `dsc check` and `dsc diff` see of the tensors in a bundle."""

from __future__ import annotations

import hashlib
import os
import shutil

import pytest
from bundle_forge import forge, sample_records
from bundle_samples import WEIGHTS, write_sample

from dsc.bundle_schema.container import rewrite_members
from dsc.bundle_schema.errors import RequestError
from dsc.compiler.bundle_tools import check_bundle, diff_bundles, extract_graph


def test_the_tensors_are_counted_and_their_hashes_compared(tmp_path):
    path = tmp_path / "sample.dsmodel"
    write_sample(path)
    assert check_bundle(path)["checks"]["weights"] == {"ok": True, "detail": "2 unique tensors"}


def test_an_index_that_names_another_tensor_is_found(tmp_path):
    """Every member is what was sealed, and the index lies."""
    records = sample_records()
    lines = records[1].payload.split(b"\n")
    lines[2] = b"0" * 64 + lines[2][64:]
    records[1].payload = b"\n".join(lines)
    path = tmp_path / "forged.dsmodel"
    path.write_bytes(forge(records))
    checks = check_bundle(path)["checks"]
    assert checks["hashes"]["ok"]
    assert not checks["weights"]["ok"]
    assert "target/graph.onnx:weight 1 is not the tensor with SHA-256 0000" in checks["weights"]["detail"]


def test_bytes_between_tensors_are_zeros(tmp_path):
    records = sample_records()
    gap = len(WEIGHTS[0])
    records[0].payload = records[0].payload[:gap] + b"x" + records[0].payload[gap + 1 :]
    path = tmp_path / "forged.dsmodel"
    path.write_bytes(forge(records))
    detail = check_bundle(path)["checks"]["weights"]["detail"]
    assert "zeros are required before target/graph.onnx:weight 1" in detail


def test_a_damaged_index_is_one_failed_check_and_no_crash(tmp_path):
    path = tmp_path / "sample.dsmodel"
    members = {member.name: member for member in write_sample(path).members}
    data = bytearray(path.read_bytes())
    data[members["weights/index.tsv"].offset + 3] ^= 1
    path.write_bytes(data)
    checks = check_bundle(path)["checks"]
    assert not checks["weights"]["ok"]
    assert "weights/index.tsv must have SHA-256" in checks["weights"]["detail"]


def test_differences_name_members_and_tensors(tmp_path):
    one, other = tmp_path / "one.dsmodel", tmp_path / "other.dsmodel"
    write_sample(one)
    shutil.copy(one, other)
    rewrite_members(other, {"card.md": b"new"})
    assert [place for place, *_ in diff_bundles(one, other)] == ["members.card.md"]
    records = sample_records()
    records[0].payload = bytes(len(WEIGHTS[0])) + records[0].payload[len(WEIGHTS[0]) :]
    first = hashlib.sha256(WEIGHTS[0]).hexdigest().encode()
    now = hashlib.sha256(bytes(len(WEIGHTS[0]))).hexdigest().encode()
    records[1].payload = records[1].payload.replace(first, now)
    other.write_bytes(forge(records))
    places = [place for place, *_ in diff_bundles(one, other)]
    assert "weights.target/graph.onnx:weight 0" in places
    assert "weights.target/graph.onnx:weight 1" not in places


def test_a_graph_that_cannot_be_written_leaves_the_older_file_and_nothing_else(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    path, output = tmp_path / "sample.dsmodel", tmp_path / "graph.onnx"
    write_sample(path)
    output.write_bytes(b"an older graph")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(RequestError, match="cannot be written: No space left"):
            extract_graph(path, "target", output)
    assert output.read_bytes() == b"an older graph"
    assert sorted(os.listdir(tmp_path)) == ["graph.onnx", "sample.dsmodel"]
    assert extract_graph(path, "target", output).read_bytes().startswith(b"not a real graph")


def test_a_graph_replaces_files_only(tmp_path):
    path, pipe = tmp_path / "sample.dsmodel", tmp_path / "pipe"
    write_sample(path)
    os.mkfifo(pipe)
    for place in (pipe, tmp_path):
        with pytest.raises(RequestError, match="another file than the bundle is required"):
            extract_graph(path, "target", place)
    assert pipe.is_fifo()
