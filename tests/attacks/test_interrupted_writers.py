"""Killed writers and full disks: the old file stays as it was, and the next writer clears up."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from bundle_samples import write_sample
from slow_writer import STAGES

from dsc.bundle_schema.bundle_errors import DiskFull
from dsc.bundle_schema.container import open_bundle, remove_leftovers, rewrite_members
from dsc.bundle_schema.errors import HostError

SUPPORT = Path(__file__).parent.parent / "support"


@contextmanager
def stopped_writer(path: Path, stage: str) -> Iterator[subprocess.Popen[str]]:
    """A process that writes `path` and has stopped at `stage`; it is killed in the end."""
    command = [sys.executable, str(SUPPORT / "slow_writer.py"), str(path), stage]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": str(SUPPORT)}) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline().strip() == stage
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("is_there", [True, False])
def test_a_killed_writer_leaves_the_old_file_and_the_next_one_clears_up(tmp_path: Path, stage: str, is_there: bool):
    path = tmp_path / "model.dsmodel"
    if is_there:
        write_sample(path)
    old = path.read_bytes() if is_there else None
    with stopped_writer(path, stage):
        pass
    assert (path.read_bytes() if path.exists() else None) == old
    assert len(os.listdir(tmp_path)) == 1 + is_there, "the killed writer's file is still there"
    write_sample(path)
    assert os.listdir(tmp_path) == ["model.dsmodel"]
    with open_bundle(path) as bundle:
        bundle.verify()


def test_files_of_living_writers_and_of_other_bundles_stay(tmp_path: Path):
    path, other = tmp_path / "model.dsmodel", tmp_path / "other.dsmodel"
    (tmp_path / ".dsc-0123456789abcdef-1-2.tmp").write_bytes(b"somebody's")
    with stopped_writer(path, "in a member"), stopped_writer(other, "created"):
        write_sample(path)
        assert remove_leftovers(path) == []
        assert len(os.listdir(tmp_path)) == 4
    assert len(remove_leftovers(path)) == 1
    assert len(remove_leftovers(other)) == 1
    assert sorted(os.listdir(tmp_path)) == [".dsc-0123456789abcdef-1-2.tmp", "model.dsmodel"]


def test_a_link_with_a_leftovers_name_is_not_followed(tmp_path: Path):
    path, precious = tmp_path / "model.dsmodel", tmp_path / "precious"
    precious.write_bytes(b"keep")
    with stopped_writer(path, "created"):
        name = next(name for name in os.listdir(tmp_path) if name.startswith(".dsc-"))
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(precious)
    write_sample(path)
    assert precious.read_bytes() == b"keep"


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """No file of this process may grow beyond `nbytes`: to a writer, a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full_at(path: Path) -> list[int]:
    """Sizes at which the disk is full: within headers, payloads, manifest and directory."""
    write_sample(path)
    size = path.stat().st_size
    with open_bundle(path) as bundle:
        edges = [member.offset for member in bundle.members.values()]
    return [0, 1, *edges, *range(5000, size, 3001), size - 22, size - 1]


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    path = tmp_path / "model.dsmodel"
    limits = full_at(path)
    old = path.read_bytes()
    for limit in limits:
        with file_size_limit(limit), pytest.raises(DiskFull, match="no room to write it"):
            write_sample(path)
        assert path.read_bytes() == old
        assert os.listdir(tmp_path) == ["model.dsmodel"]


def test_a_full_disk_while_resealing_keeps_the_bundle(tmp_path: Path):
    path = tmp_path / "model.dsmodel"
    limits = full_at(path)
    old = path.read_bytes()
    for limit in limits[::4]:
        with file_size_limit(limit), pytest.raises(DiskFull):
            rewrite_members(path, {"card.md": b"a longer card"})
        assert path.read_bytes() == old


def test_a_read_only_folder_is_the_hosts_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = tmp_path / "model.dsmodel"
    write_sample(path)
    old = path.read_bytes()
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(HostError, match="cannot be written: Permission denied"):
        write_sample(path)
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["model.dsmodel"]
