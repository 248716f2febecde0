"""The native libraries in an onnxruntime that is older than what they read of it: an error, never a crash."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
from native_operator import library

from dsc.kernels import cuda_op

GET_API = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)
CREATE_STATUS = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)
STATUS = 0x1230


class ApiBase(ctypes.Structure):
    """What onnxruntime hands to a library: a function that gives the table of a version."""

    _fields_ = (("get_api", GET_API), ("get_version", ctypes.c_void_p))


@pytest.fixture
def old_onnxruntime():
    """One that knows the first version alone, and the errors that were made in it."""
    errors = []

    @CREATE_STATUS
    def create_status(code, text):
        errors.append((code, text.decode()))
        return STATUS

    table = (ctypes.c_void_p * 1)(ctypes.cast(create_status, ctypes.c_void_p))
    base = ApiBase(GET_API(lambda version: ctypes.addressof(table) if version == 1 else None))
    yield base, errors
    del create_status


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_an_older_onnxruntime_is_told_what_is_required(old_onnxruntime, tmp_path, name):
    path = library()
    if name == "cuda":
        if shutil.which("gcc") is None:
            pytest.skip("gcc, which builds the library, is not installed")
        path, source = tmp_path / "op.so", Path(cuda_op.__file__).parent / "dspark_cuda_op.c"
        subprocess.run(["gcc", "-O1", "-std=gnu11", "-shared", "-fPIC", "-o", path, source], check=True)
    register = ctypes.CDLL(str(path)).RegisterCustomOps
    register.restype, register.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.POINTER(ApiBase)]
    base, errors = old_onnxruntime
    assert register(None, ctypes.byref(base)) == STATUS
    assert errors == [(1, "ai.dspark: onnxruntime 1.18 or newer is required")]
