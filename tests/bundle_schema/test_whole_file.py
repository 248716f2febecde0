"""Files beside the bundle: whole, or as they were before."""

import os
from pathlib import Path

import pytest

from dsc.bundle_schema.whole_file import whole_file


@pytest.mark.parametrize("older", [None, b"an older and longer file"])
def test_the_file_is_there_when_the_block_ends(tmp_path: Path, older: bytes | None):
    path = tmp_path / "file"
    if older is not None:
        path.write_bytes(older)
    with whole_file(path) as file:
        file.write(b"new")
        assert (path.read_bytes() if path.exists() else None) == older
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("older", [None, b"an older file"])
@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_what_fails_in_between_leaves_nothing(tmp_path: Path, older: bytes | None, failure: BaseException):
    path = tmp_path / "file"
    if older is not None:
        path.write_bytes(older)

    def write() -> None:
        with whole_file(path) as file:
            file.write(b"some")
            raise failure

    with pytest.raises(type(failure)):
        write()
    assert (path.read_bytes() if path.exists() else None) == older
    assert os.listdir(tmp_path) == ([] if older is None else ["file"])


def test_a_link_is_followed_and_kept(tmp_path: Path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_bytes(b"old")
    link.symlink_to(real)
    with whole_file(link) as file:
        file.write(b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"


def test_others_may_read_it_as_the_umask_says(tmp_path: Path):
    before = os.umask(0o027)
    try:
        with whole_file(tmp_path / "file") as file:
            file.write(b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
