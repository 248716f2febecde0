"""The library that launches kernels inside CUDA graphs: that it is found, refused and used only as it should be."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import onnxruntime as ort
import pytest

from dsc.kernels import cuda_op

SOURCE = Path(cuda_op.__file__).parent / "dspark_cuda_op.c"


def build(path, source):
    if shutil.which("gcc") is None:
        pytest.skip("gcc, which builds the library, is not installed")
    command = ["gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-std=gnu11", "-fvisibility=hidden", "-shared", "-fPIC"]
    subprocess.run([*command, "-o", path, source], check=True)
    return path


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return build(tmp_path_factory.mktemp("op") / "op.so", SOURCE)


def test_both_sides_agree_on_the_table(library, monkeypatch):
    assert ctypes.CDLL(str(library)).dspark_cuda_table_size() == ctypes.sizeof(cuda_op.Table)
    monkeypatch.setattr(cuda_op, "installed", lambda name: library)
    assert cuda_op.find_cuda_op() == cuda_op.NativeLibrary(library, "")


def test_a_library_that_is_missing_or_of_another_version_is_a_reason(tmp_path, monkeypatch):
    other = tmp_path / "other.c"
    other.write_text('__attribute__((visibility("default"))) long dspark_cuda_table_size(void) { return 8; }\n')
    found = {
        None: "no library",
        Path("/no/such.so"): "cannot be used",
        build(tmp_path / "other.so", other): "of another",
    }
    for path, reason in found.items():
        monkeypatch.setattr(cuda_op, "installed", lambda name, path=path: path)
        assert cuda_op.find_cuda_op().path is None
        assert reason in cuda_op.find_cuda_op().reason


def test_a_session_that_was_given_no_table_is_refused(library):
    with pytest.raises(Exception, match=r"ai\.dspark::VerifyAttention: no table of kernels was stated"):
        ort.SessionOptions().register_custom_ops_library(str(library))
