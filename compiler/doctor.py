"""What this installation can do: packages, providers, the native library, processors."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from importlib import metadata
from typing import Any

from dsc.bundle_schema.errors import HostError

ORT_WHEELS = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-directml",
    "onnxruntime-openvino",
    "onnxruntime-qnn",
    "onnxruntime-training",
    "ort-nightly",
    "ort-nightly-gpu",
)
_COMPILE_PACKAGES = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "gguf")  # Triton: for GPU kernels only


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def onnxruntime_wheels() -> dict[str, str]:
    """Installed distributions that bring the package `onnxruntime`, with their versions: known ones, and any other."""
    brought = metadata.packages_distributions().get("onnxruntime", [])
    names = dict.fromkeys([*ORT_WHEELS, *(re.sub(r"[-_.]+", "-", name).lower() for name in brought)])
    return {name: version for name in names if (version := installed_version(name))}


def onnxruntime_problem() -> str | None:
    """Why onnxruntime cannot be relied on here, or None.

    All of its wheels install into one folder and overwrite each other's files.
    """
    found = onnxruntime_wheels()
    if len(found) > 1:
        return (
            f"{' and '.join(found)} are installed together and overwrite each other: "
            "uninstall all of them, then install `dsc-toolchain[cpu]` or `dsc-toolchain[cuda]`"
        )
    if not found:
        return "onnxruntime is missing: install `dsc-toolchain[cpu]` or `dsc-toolchain[cuda]`"
    return None


def cuda_driver() -> str:
    """What the CUDA driver library says of itself."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return f"none ({error})"
    count, version = ctypes.c_int(), ctypes.c_int()
    if library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count)):
        return "present, but it finds no device"
    library.cuDriverGetVersion(ctypes.byref(version))
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}, {count.value} devices"


def native_library() -> str:
    """Where the native CPU kernels are, or why they are not there."""
    from dsc.kernels.native import find_library

    library = find_library()
    return str(library.path) if library.path is not None else f"none: {library.reason}"


def _allowed_processors(runs: bool) -> int:
    """As many as the runtime uses threads by default; without onnxruntime it cannot be asked."""
    if not runs:
        return len(os.sched_getaffinity(0))
    from dsc.runtime.host_cpus import allowed_cpus

    return allowed_cpus()


def _missing_to_compile() -> list[str]:
    return [name for name in _COMPILE_PACKAGES if installed_version(name) is None]


def examine() -> dict[str, Any]:
    """`fields` to show and `problems` that keep bundles from running."""
    problems = [problem for problem in [onnxruntime_problem()] if problem]
    missing = _missing_to_compile()
    fields: dict[str, Any] = {
        "dsc": installed_version("dsc-toolchain"),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {platform.system()}",
        "allowed processors": _allowed_processors(runs=not problems),
        **onnxruntime_wheels(),
        "native CPU kernels": native_library(),
        "CUDA driver": cuda_driver(),
        "can run bundles": not problems,
        "can compile": "yes" if not missing else f"no: {', '.join(missing)} missing (install [compile])",
    }
    return {"fields": fields, "problems": problems}


def require_compile_packages() -> None:
    """Refuse to compile before any work when a package is missing.

    Raises:
        HostError: a package of the `[compile]` extra is not installed.
    """
    missing = _missing_to_compile()
    if missing:
        raise HostError("dsc compile", f"needs {', '.join(missing)}", "pip install 'dsc-toolchain[cpu,compile]'")
