"""Build the stub CUDA libraries that onnxruntime's CUDA provider asks for; needs gcc and binutils, no GPU."""

from __future__ import annotations

import os
import subprocess
from collections import defaultdict
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PACKAGE = FOLDER.parents[2] / "build" / "ort-gpu"
PROVIDER = PACKAGE / "onnxruntime" / "capi" / "libonnxruntime_providers_cuda.so"
WHY_NOT = "needs onnxruntime-gpu in build/ort-gpu: make ort-gpu"
DRIVER = "libcuda.so.1"
SOURCES = {DRIVER: FOLDER.parent / "mock_cuda.c", "libcudart.so.13": FOLDER / "runtime.c"}
SOURCES["libcublas.so.13"] = FOLDER / "cublas.c"


def environment(stubs: Path) -> dict[str, str]:
    """Of a process that gets the GPU build of onnxruntime and the stubs."""
    return os.environ | {"LD_LIBRARY_PATH": str(stubs), "PYTHONPATH": str(PACKAGE)}


def build_stubs(provider: Path, folder: Path) -> Path:
    """The libraries that `provider` is linked against, each with every symbol that it wants.

    Args:
        provider: ``libonnxruntime_providers_cuda.so``.
        folder: receives the libraries.

    Returns:
        `folder`, for ``LD_LIBRARY_PATH``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = _wanted(provider)
    for library in (DRIVER, *sorted(set(_linked(provider)) - {DRIVER})):
        source = SOURCES.get(library)
        text = f'#include "{source}"\n' if source else ""
        known = _defined(source, folder) if source else set()
        text += "".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(wanted[library] - known))
        _compile(folder, library, text)
    return folder


def _linked(provider: Path) -> list[str]:
    lines = _run("readelf", "-d", provider).splitlines()
    needed = [line.split("[")[1].rstrip("]") for line in lines if "(NEEDED)" in line]
    return [name for name in needed if name.startswith(("libcu", "libnv"))]


def _wanted(provider: Path) -> dict[str, set[str]]:
    """Library -> symbols; the driver's carry no version."""
    found = defaultdict(set)
    for line in _run("nm", "-D", "--undefined-only", provider).splitlines():
        name, _, library = line.split()[-1].partition("@")
        if library.startswith(("libcu", "libnv")):
            found[library].add(name)
        elif name.startswith("cu") and not library:
            found[DRIVER].add(name)
    return found


def _defined(source: Path, folder: Path) -> set[str]:
    unit = folder / f"{source.stem}.o"
    _run("gcc", "-c", "-o", unit, source)
    return {line.split()[-1] for line in _run("nm", "--defined-only", "--extern-only", unit).splitlines()}


def _compile(folder: Path, library: str, text: str) -> None:
    source, versions = folder / f"{library}.c", folder / f"{library}.map"
    source.write_text(text)
    versions.write_text(f"{library} {{ global: *; }};\n")
    command = ["gcc", "-O1", "-w", "-shared", "-fPIC", f"-Wl,-soname,{library}", "-o", folder / library, source]
    if library != DRIVER:  # the driver's symbols have no version, and it keeps the log
        command += [f"-Wl,--version-script={versions}", folder / DRIVER]
    _run(*command)


def _run(*command: str | Path) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr}")
    return done.stdout
