"""Resource usage and opcode counts of compiled kernels, read with the tools inside the Triton package."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

from dsc.bundle_schema.errors import HostError, KernelError
from dsc.kernels.launch_record import Resources

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_OPCODE = re.compile(r"^\s*(?:/\*[0-9a-f]+\*/)?\s*(?:@!?U?P[T0-9]+\s+)?([A-Z][A-Z0-9_]*)(?:\.\w+)*[\s;]", re.M)
_PTX_MMA = re.compile(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)")


@cache
def tool(name: str) -> Path:
    """The path of a bundled tool: ``ptxas``, ``ptxas-blackwell``, ``cuobjdump`` or ``nvdisasm``.

    Raises:
        HostError: Triton, which holds the tools, is not installed or lacks the tool.
    """
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        raise HostError("triton", "is not installed", "pip install 'dsc-toolchain[compile]'")
    path = Path(spec.origin).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        raise HostError(str(path), "the tool is missing from the Triton package", "install triton==3.8.*")
    return path


def _output(command: list[str]) -> str:
    """Standard output of a tool."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelError(Path(command[0]).name, f"ended with code {done.returncode}: {done.stderr.strip()[:300]}")
    return done.stdout


@cache
def ptxas_version(name: str) -> str:
    """The release of an assembler, such as ``12.9.86``."""
    found = re.search(r"V(\d+\.\d+\.\d+)", _output([str(tool(name)), "--version"]))
    return found.group(1) if found else "unknown"


def resources(cubin: bytes) -> Resources:
    """Registers, stack, shared and local memory of the one kernel in a cubin.

    `Resources.shared` is what the image reserves by itself; dynamic shared memory is in the launch record.

    Raises:
        KernelError: the tool cannot read the image.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = _output([str(tool("cuobjdump")), "-res-usage", file.name])
    found = _USAGE.search(text)
    if found is None:
        raise KernelError("cuobjdump", f"printed no resource usage: {text[:200]!r}")
    registers, stack, shared, local = (int(number) for number in found.groups())
    return Resources(registers=registers, stack=stack, shared=shared, local=local)


def opcodes(cubin: bytes) -> dict[str, int]:
    """How often each opcode (without its modifiers) occurs in a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = _output([str(tool("nvdisasm")), "-c", file.name])
    return dict(sorted(Counter(_OPCODE.findall(text)).items()))


def ptx_opcodes(ptx: str) -> dict[str, int]:
    """How often each matrix instruction occurs in PTX text."""
    return dict(sorted(Counter(_PTX_MMA.findall(ptx)).items()))


def amd_opcodes(assembly: str) -> dict[str, int]:
    """How often each matrix and scratch (spill) instruction occurs in AMD GCN assembly text."""
    found = re.findall(r"^\s*(v_mfma|scratch_load|scratch_store|buffer_load|global_load)", assembly, re.M)
    return dict(sorted(Counter(found).items()))
