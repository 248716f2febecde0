"""Building, finding and going without the native library."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from native_operator import library

from dsc.bundle_schema.errors import KernelError
from dsc.kernels import native

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = (
    "attention_avx2",
    "attention_avx512",
    "matmul_avx2",
    "matmul_avx512",
    "dense_avx2",
    "dense_avx512",
    "bfloat16_avx2",
    "bfloat16_avx512",
    "int16_avx2",
    "int16_avx512",
    "copied_avx512",
)
PARTS = ("matmul", "dense", "gather", "attention", "fused", *WIDTHS)


def c_compiler() -> str:
    compiler = shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    return compiler


def test_a_folder_without_one_says_so(tmp_path):
    found = native.find_library(tmp_path)
    assert found.path is None
    assert "no native library" in found.reason
    assert native.library_path(tmp_path) is None


def test_a_file_that_is_no_library_says_so(tmp_path):
    (tmp_path / native.built_name()).write_bytes(b"no library")
    assert "cannot be used" in native.find_library(tmp_path).reason


def test_another_processor_says_so(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert "x86-64" in native.find_library().reason


def test_it_is_built_once(tmp_path, monkeypatch):
    shutil.copy(library(), tmp_path / native.built_name())
    monkeypatch.setattr(subprocess, "run", None)
    assert native.build(tmp_path) == tmp_path / native.built_name()


def test_without_a_compiler_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(KernelError, match="install gcc"):
        native.build(tmp_path)


def test_a_compiler_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(KernelError, match="do not compile"):
        native.build(tmp_path, compiler="false")
    assert not list(tmp_path.iterdir())


def test_the_package_builds_the_same_sources_with_the_same_flags():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    module, _ = settings["tool"]["setuptools"]["ext-modules"]
    assert module["optional"]
    assert module["sources"] == [f"kernels/{name}" for name in native.SOURCES]
    assert module["depends"] == [f"kernels/{name}" for name in native.HEADERS]
    assert [flag for flag in module["extra-compile-args"] if flag != "-g0"] == list(native.FLAGS)


@pytest.mark.slow
def test_random_shapes_touch_no_foreign_memory(tmp_path):
    """The kernels alone, on buffers of exactly the stated sizes, under the address and behaviour sanitizers."""
    compiler = c_compiler()
    kernels = ROOT / "kernels"
    command = [compiler, "-O1", "-g", "-std=gnu11", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    command += [f"-I{kernels}", ROOT / "tests/support/native_fuzz.c"]
    sources = [kernels / f"dspark_{name}.c" for name in PARTS]
    subprocess.run([*command, *sources, "-lm", "-o", tmp_path / "fuzz"], check=True)
    subprocess.run([tmp_path / "fuzz", "400"], check=True)


def test_wide_and_narrow_vectors_give_the_same_bits(tmp_path):
    compiler = c_compiler()
    sources = [ROOT / "tests/support/native_paths.c", *(ROOT / f"kernels/dspark_{name}.c" for name in WIDTHS)]
    command = [compiler, *native.FLAGS, f"-I{ROOT / 'kernels'}", *sources, "-lm", "-o", tmp_path / "paths"]
    subprocess.run(command, check=True)
    done = subprocess.run([tmp_path / "paths", "250"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    if done.stdout == "0\n":
        pytest.skip("this processor has no AVX-512 with VNNI, and so narrow vectors only")
    assert done.stdout == "250\n"


def test_a_library_of_another_revision_is_refused_with_both_numbers(tmp_path, monkeypatch):
    native.build(tmp_path)
    monkeypatch.setattr(native, "REVISION", native.REVISION + 1)
    reason = native.find_library(tmp_path).reason
    assert f"revision {native.REVISION - 1}" in reason
    assert str(native.REVISION) in reason


def test_the_library_serves_graphs_of_its_own_operators_only(monkeypatch):
    monkeypatch.setattr(native, "find_library", lambda: native.NativeLibrary(None, "found"))
    ours = {"ai.onnx::Add", "com.microsoft::BlockMatMul", "ai.dspark::SwiGlu", "ai.dspark::Experts"}
    assert native.find_library_for(ours).reason == "found"
    assert "graph has BlockMatMul" in native.find_library_for(ours | {"ai.dspark::BlockMatMul"}).reason


def test_every_operator_is_registered_and_no_other():
    text = "".join((ROOT / "kernels" / name).read_text() for name in native.SOURCES)
    assert set(re.findall(r'_name\(const OrtCustomOp \*op\) { \(void\)op; return "(\w+)"; }', text)) == native.OPERATORS
