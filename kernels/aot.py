"""Ahead-of-time compilation of Triton kernels for named GPUs on a machine that has none.

Same variant, architecture and tool versions give the same bytes in any folder and process: line information
is off (it holds paths), floating-point fusion is pinned, and every build uses a fresh Triton cache.
Finished kernels are kept in a cache directory keyed by the content of the kernel's source, its
configuration and the tools.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from dsc.bundle_schema.errors import DscError, HostError, KernelError
from dsc.kernels import sass
from dsc.kernels.gpu_targets import Architecture, architecture, architectures
from dsc.kernels.kernel_variant import KernelVariant
from dsc.kernels.launch_record import GridFactor, KernelArg, LaunchRecord

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel as TritonKernel

SUPPORTED_TRITON = "3.8."
# PTX 8.0 is what CUDA 12.0 drivers translate; nothing newer is needed for compute_80.
_FALLBACK_PTX = 80
_PTX_TO_CUDA = {"8.0": 12000, "8.8": 12090}
_Job = tuple[KernelVariant, str, Path | None]  # variant, architecture, where in the cache the result belongs
_TENSOR_OPCODES = ("HMMA", "IMMA", "HGMMA", "IGMMA", "UTCHMMA", "UTCIMMA", "LDL", "STL")


@dataclass(frozen=True)
class CompiledKernel:
    """One built variant: how to launch it and its code (cubin, PTX text or AMD code object)."""

    record: LaunchRecord
    code: bytes


def compiler_version() -> str:
    """The installed Triton version.

    Raises:
        HostError: Triton is missing or is a version whose output was never checked.
    """
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        raise HostError("triton", "is not installed", "pip install 'dsc-toolchain[compile]'") from None
    if not version.startswith(SUPPORTED_TRITON):
        raise HostError(
            "triton",
            f"version {SUPPORTED_TRITON}* is required, {version} is installed",
            "pip install 'triton==3.8.*'",
        )
    return version


def content_key(variant: KernelVariant, arch: Architecture) -> str:
    """The cache key as hex sha256: source of the Triton modules, variant, architecture, tool version.

    The modules use one another's functions, so a change of one invalidates all. The whole variant counts, what it
    serves too: its record is kept with the code.
    """
    spec = importlib.util.find_spec(f"dsc.kernels.{variant.module}")
    if spec is None or spec.origin is None:
        raise KernelError(variant.name, f"its module dsc.kernels.{variant.module} does not exist")
    sources = hashlib.sha256()
    for path in sorted(Path(spec.origin).parent.glob("*_triton.py")):
        sources.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    parts = {
        "source": sources.hexdigest(),
        "variant": asdict(variant),
        "arch": arch.name,
        "triton": compiler_version(),
        "format": 2,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=GridFactor.model_dump).encode()).hexdigest()


def compile_kernel(variant: KernelVariant, arch: Architecture) -> CompiledKernel:
    """Compile one variant for one architecture; needs no GPU, driver or CUDA toolkit.

    Raises:
        KernelError: Triton refuses the kernel; the message holds the compiler's own.
        HostError: Triton is missing, has another version or is in interpreter mode.
    """
    version = compiler_version()
    with _plain_environment():
        built = _build(variant, arch)
    code = built.asm[arch.image]
    data = code.encode() if isinstance(code, str) else bytes(code)
    return CompiledKernel(record=_record(variant, arch, built, data, version), code=data)


@contextmanager
def _plain_environment() -> Iterator[None]:
    """Without the variables by which Triton, LLVM and the assembler make other code.

    Raises:
        HostError: Triton is in interpreter mode.
    """
    from triton import knobs
    from triton._C.libtriton import get_cache_invalidating_env_vars

    if knobs.runtime.interpret:
        raise HostError("TRITON_INTERPRET", "is set: kernels cannot be compiled in interpreter mode", "unset it")
    groups = (knobs.compilation, knobs.language, knobs.runtime, knobs.nvidia, knobs.amd)
    names = {knob.key for group in groups for knob in group.knob_descriptors.values()}
    names |= get_cache_invalidating_env_vars().keys()
    hidden = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _build(variant: KernelVariant, arch: Architecture) -> TritonKernel:
    """Run Triton with everything switched off that could leak where and when it runs."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.errors import TritonError

    kernel = getattr(importlib.import_module(f"dsc.kernels.{variant.module}"), variant.function)
    names = kernel.arg_names
    types = dict(variant.signature)
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): _constant(value) for name, value in variant.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in variant.divisible_by_16},
    )
    options: dict[str, Any] = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    options["enable_fp_fusion"] = True
    if variant.max_registers is not None and arch.backend == "cuda":
        options["maxnreg"] = variant.max_registers
    if arch.backend == "cuda":
        options["ptx_options"] = ""  # its default is what the environment said when Triton was imported
    if arch.image == "ptx":
        options["ptx_version"] = _FALLBACK_PTX
    target = GPUTarget(arch.backend, arch.triton_arch, arch.warp_size)
    with (
        tempfile.TemporaryDirectory(prefix="dsc-triton-") as scratch,
        knobs.compilation.scope(),
        knobs.cache.scope(),
    ):
        knobs.compilation.disable_line_info = True
        knobs.cache.dir = scratch
        try:
            return triton.compile(source, target=target, options=options)
        except (TritonError, RuntimeError) as error:
            raise KernelError(variant.name, f"does not compile for {arch.name}: {error}") from error


def _constant(value: int | float | bool | str) -> Any:
    """A compile-time constant as Triton takes it; text names an element type."""
    import triton.language as tl

    return getattr(tl, value) if isinstance(value, str) else value


def _record(variant: KernelVariant, arch: Architecture, built: TritonKernel, code: bytes, version: str) -> LaunchRecord:
    """The launch record of a finished kernel."""
    meta = built.metadata
    usage, counts = None, {}
    if arch.image == "cubin":
        usage = sass.resources(code)
        counts = {name: n for name, n in sass.opcodes(code).items() if name in _TENSOR_OPCODES}
    elif arch.image == "ptx":
        counts = sass.ptx_opcodes(code.decode())
    else:
        counts = sass.amd_opcodes(built.asm["amdgcn"])
    ptx_version, assembler, driver = _tool_versions(arch, built)
    return LaunchRecord(
        kernel=variant.kernel,
        variant=variant.name,
        arch=arch.name,
        image=arch.image,
        entry=meta.name,
        args=tuple(KernelArg(name=name, type=kind) for name, kind in variant.signature),
        constants=dict(sorted(variant.constants.items())),
        divisible_by_16=variant.divisible_by_16,
        grid=variant.grid,
        equals=variant.equals,
        at_most=variant.at_most,
        num_warps=meta.num_warps,
        num_ctas=meta.num_ctas,
        num_stages=meta.num_stages,
        warp_size=arch.warp_size,
        shared=meta.shared,
        tmem_size=getattr(meta, "tmem_size", None) or 0,
        global_scratch_size=getattr(meta, "global_scratch_size", 0),
        global_scratch_align=getattr(meta, "global_scratch_align", 1),
        profile_scratch_size=getattr(meta, "profile_scratch_size", 0),
        profile_scratch_align=getattr(meta, "profile_scratch_align", 1),
        cooperative=bool(meta.launch_cooperative_grid),
        programmatic_launch=bool(getattr(meta, "launch_pdl", False)),
        resources=usage,
        opcodes=counts,
        sha256=hashlib.sha256(code).hexdigest(),
        triton_version=version,
        assembler_version=assembler,
        ptx_version=ptx_version,
        minimum_driver=driver,
        line_info=False,
        fp_fusion=True,
    )


def _tool_versions(arch: Architecture, built: TritonKernel) -> tuple[str, str, int]:
    """(PTX version, assembler version, least CUDA version of the driver); empty and 0 for AMD.

    Drivers take a cubin made by any assembler of their own major version; PTX they must themselves
    understand.
    """
    if arch.backend != "cuda":
        return "", "", 0
    found = re.search(r"^\.version (\d+\.\d+)", built.asm["ptx"], re.M)
    ptx_version = found.group(1) if found else ""
    if arch.image == "ptx":
        return ptx_version, "", _PTX_TO_CUDA[ptx_version]
    capability = arch.capability or (0, 0)
    assembler = sass.ptxas_version("ptxas-blackwell" if capability[0] >= 10 else "ptxas")
    return ptx_version, assembler, int(assembler.split(".")[0]) * 1000


def _load(folder: Path) -> CompiledKernel | None:
    """A kernel from the cache, or None when it is absent, damaged or not to be read."""
    try:
        record = LaunchRecord.model_validate_json((folder / "record.json").read_bytes())
        code = (folder / "code").read_bytes()
    except (OSError, ValidationError):
        return None
    return CompiledKernel(record, code) if hashlib.sha256(code).hexdigest() == record.sha256 else None


def _store(folder: Path, kernel: CompiledKernel) -> None:
    """Put a kernel into the cache; the folder appears whole or not at all.

    Raises:
        HostError: the cache cannot be written.
    """
    try:
        _store_whole(folder, kernel)
    except OSError as error:
        hint = "make room there, or set XDG_CACHE_HOME to another folder"
        raise HostError(str(folder.parent), f"compiled kernels cannot be kept there: {error.strerror}", hint) from error


def _store_whole(folder: Path, kernel: CompiledKernel) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as scratch:
        made = Path(scratch) / "kernel"
        made.mkdir()
        (made / "code").write_bytes(kernel.code)
        (made / "record.json").write_text(kernel.record.model_dump_json(indent=1))
        try:
            os.rename(made, folder)
        except OSError:
            # Another process put it there first, or a damaged entry lies there: replace the files in place.
            for name in ("code", "record.json"):
                os.replace(made / name, folder / name)


def _compile_and_keep(job: _Job) -> CompiledKernel:
    """Compile, and put the result into the cache at once: what is done stays done when the rest is interrupted."""
    variant, arch_name, folder = job
    kernel = compile_kernel(variant, architecture(arch_name))
    if folder:
        _store(folder, kernel)
    return kernel


def _compile_in_process(jobs: list[_Job]) -> list[CompiledKernel]:
    """Compile jobs in a fresh Python process.

    Not `multiprocessing`: its start methods import the caller's main script again, which a library must not do.
    """
    command = [sys.executable, "-P", "-c", "from dsc.kernels.aot import worker; worker()"]
    done = subprocess.run(command, input=pickle.dumps(jobs), stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise KernelError("kernel compiler process", f"ended with code {done.returncode}", "see its messages above")
    result = pickle.loads(done.stdout)
    if isinstance(result, DscError):
        raise result
    return list(result)


def worker() -> None:
    """Body of a compiler process: pickled jobs on standard input, pickled kernels or an error on output."""
    output = os.dup(1)
    os.dup2(2, 1)
    result: list[CompiledKernel] | DscError
    try:
        result = [_compile_and_keep(job) for job in pickle.load(sys.stdin.buffer)]
    except DscError as error:
        result = error
    with os.fdopen(output, "wb") as stream:
        pickle.dump(result, stream)


def default_cache() -> Path:
    """The per-user directory of compiled kernels."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "dsc" / "kernels"


def n_cached(jobs: Sequence[tuple[KernelVariant, Architecture]], cache: Path) -> int:
    """How many of the jobs have their result in the cache."""
    return sum((cache / content_key(*job)).is_dir() for job in jobs)


def compile_kernels(
    variants: Iterable[KernelVariant],
    arch_names: str | tuple[str, ...],
    *,
    cache: Path | None = None,
    workers: int = 2,
) -> list[CompiledKernel]:
    """Compile every variant for every architecture, in parallel and from the cache where possible.

    Args:
        variants: what to compile.
        arch_names: architectures, comma-separated or as a tuple.
        cache: directory of finished kernels; None compiles everything.
        workers: number of processes; 1 compiles in this one.

    Returns:
        The kernels, ordered by architecture as given, then by variant.

    Raises:
        KernelError: an architecture is unknown (checked first) or a kernel does not compile.
        HostError: Triton is missing or has another version.
    """
    targets = architectures(arch_names)
    return compile_jobs([(variant, target) for target in targets for variant in variants], cache=cache, workers=workers)


def compile_jobs(
    jobs: Sequence[tuple[KernelVariant, Architecture]], *, cache: Path | None, workers: int
) -> list[CompiledKernel]:
    """Compile each variant for its architecture; arguments, errors and order as of `compile_kernels`."""
    compiler_version()
    folders = [cache / content_key(*job) if cache else None for job in jobs]
    done = {i: found for i, folder in enumerate(folders) if folder and (found := _load(folder))}
    missing = [i for i in range(len(jobs)) if i not in done]
    todo: list[_Job] = [(jobs[i][0], jobs[i][1].name, folders[i]) for i in missing]
    built: list[CompiledKernel] = []
    if workers > 1 and len(todo) > 1:
        shards = [todo[i::workers] for i in range(min(workers, len(todo)))]
        with ThreadPoolExecutor(len(shards)) as pool:
            finished = list(pool.map(_compile_in_process, shards))
        built = [finished[i % len(shards)][i // len(shards)] for i in range(len(todo))]
    else:
        built = [_compile_and_keep(job) for job in todo]
    done |= dict(zip(missing, built, strict=True))
    return [done[i] for i in range(len(jobs))]
