"""The optional native library of the `ai.dspark` operators for ONNX Runtime's CPU provider.

The library is plain C without ONNX Runtime's headers.  `pip install` builds it as the extension module
``dsc.kernels._dspark_cpu`` where a C compiler is at hand; it is loaded by path, never imported.  A session that
registers it runs its kernels in place of the operators' function bodies; without it the bodies run.

What it adds: every row's result is the same bits however many rows or threads take part, so greedy verification
of several tokens equals decoding them one by one.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Collection
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from dsc.bundle_schema.errors import KernelError

_FOLDER = Path(__file__).resolve().parent
_NAME = "_dspark_cpu"
SOURCES = (
    "dspark_cpu.c",
    "dspark_dense_ops.c",
    "dspark_product_ops.c",
    "dspark_attention_ops.c",
    "dspark_matmul.c",
    "dspark_matmul_avx2.c",
    "dspark_matmul_avx512.c",
    "dspark_gather.c",
    "dspark_dense.c",
    "dspark_dense_avx2.c",
    "dspark_dense_avx512.c",
    "dspark_bfloat16_avx2.c",
    "dspark_bfloat16_avx512.c",
    "dspark_int16_avx2.c",
    "dspark_int16_avx512.c",
    "dspark_copied_avx512.c",
    "dspark_attention.c",
    "dspark_attention_avx2.c",
    "dspark_attention_avx512.c",
    "dspark_fused.c",
)
HEADERS = (
    "dspark_attention.h",
    "dspark_attention_tile.h",
    "dspark_cpu.h",
    "dspark_dense.h",
    "dspark_dense_tile.h",
    "dspark_exp.h",
    "dspark_lanes.h",
    "dspark_matmul.h",
    "dspark_matmul_tile.h",
    "dspark_narrow.h",
    "dspark_node.h",
    "dspark_ort.h",
    "dspark_wide.h",
)
# No -march (the code picks AVX2 or AVX-512 by function), no -ffast-math; fused multiply-adds where the source says so.
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fvisibility=hidden")
# onnxruntime runs an operator's body without a word when a library lacks it, so an older library is refused.
REVISION = 7
OPERATORS = frozenset(
    {
        "DenseMatMul",
        "DenseMatMulSkipNorm",
        "Int16Gather",
        "Int16MatMul",
        "Int16MatMulSkipNorm",
        "InterleavedGather",
        "InterleavedMatMul",
        "InterleavedMatMulSkipNorm",
        "QkvAttention",
        "SwiGlu",
        "VerifyAttention",
    }
)
"""What the library implements."""
BY_BODY = frozenset({"Experts"})
"""What a graph for the library may leave to a function body."""
_MACHINES = frozenset({"x86_64", "amd64"})


@dataclass(frozen=True)
class NativeLibrary:
    """Where the library is, or why there is none.

    Attributes:
        path: file for ``SessionOptions.register_custom_ops_library``; None when it cannot be used here.
        reason: why it cannot be used; empty when it can.
    """

    path: Path | None
    reason: str


def find_library(folder: Path | None = None) -> NativeLibrary:
    """Looks for a library that this processor can run.

    Args:
        folder: where `build` put one; by default the one that was built at installation is looked for.
    """
    if platform.machine().lower() not in _MACHINES:
        return NativeLibrary(None, f"the native kernels need an x86-64 processor, this is {platform.machine()}")
    path = installed(_NAME) if folder is None else folder / built_name()
    if path is None or not path.is_file():
        place = "beside this module" if folder is None else f"in {folder}"
        return NativeLibrary(None, f"no native library {place} (it was not built for want of a C compiler?)")
    try:
        library = ctypes.CDLL(os.fspath(path))
        supported, revision = library.dspark_cpu_supported(), library.dspark_cpu_revision()
    except (OSError, AttributeError) as error:
        return NativeLibrary(None, f"{path.name} cannot be used: {error} (install dsc again to build it anew)")
    if revision != REVISION:
        return NativeLibrary(
            None, f"{path.name} has kernels of revision {revision}, {REVISION} is required (install dsc again)"
        )
    if not supported:
        return NativeLibrary(None, "the native kernels need a processor with AVX2 and FMA")
    return NativeLibrary(path, "")


def find_library_for(operators: Collection[str]) -> NativeLibrary:
    """As `find_library`, for a graph with these ``domain::operator``.

    onnxruntime runs an operator's body without a word when the library lacks it, slower and with other roundings, so
    a graph that needs more than the library has is none for it.
    """
    ours = {name.partition("::")[2] for name in operators if name.startswith("ai.dspark::")}
    if missing := sorted(ours - OPERATORS - BY_BODY):
        why = f"the bundle's graph has {missing[0]}, which the native library of this version lacks (compile it again)"
        return NativeLibrary(None, why)
    return find_library()


def library_path(folder: Path | None = None) -> Path | None:
    """The path of `find_library`, or None."""
    return find_library(folder).path


def built_name() -> str:
    """File name that `build` gives the library: it changes with the sources and the flags."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for name in SOURCES + HEADERS:
        digest.update((_FOLDER / name).read_bytes())
    return f"{_NAME}-{digest.hexdigest()[:16]}.so"


def build(output_dir: Path, compiler: str | None = None) -> Path:
    """Compiles the library with the system's C compiler; does nothing when it is there already.

    Args:
        output_dir: folder that receives it, made if missing.
        compiler: program to run; by default the first of cc, gcc and clang on the search path.

    Returns:
        The library's path.

    Raises:
        KernelError: there is no compiler, or it failed; no file is left behind.
    """
    target = output_dir / built_name()
    if target.is_file():
        return target
    program = shutil.which(compiler) if compiler else _compiler()
    if program is None:
        raise KernelError(
            compiler or "C compiler",
            "building the native kernels requires a C compiler, none was found",
            "install gcc or clang, or go without: ONNX Runtime then runs the operators' bodies",
        )
    output_dir.mkdir(parents=True, exist_ok=True)
    partial = output_dir / f"{target.name}.{os.getpid()}.tmp"
    command = [program, *FLAGS, "-shared", "-fPIC", "-o", os.fspath(partial)]
    command += [os.fspath(_FOLDER / name) for name in SOURCES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise KernelError(program, f"the native kernels do not compile: {done.stderr.strip()[-2000:]}")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def _compiler() -> str | None:
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def installed(name: str) -> Path | None:
    """The file of an extension module beside this one, None when it was not built."""
    candidates = (_FOLDER / f"{name}{suffix}" for suffix in EXTENSION_SUFFIXES)
    return next((path for path in candidates if path.is_file()), None)
