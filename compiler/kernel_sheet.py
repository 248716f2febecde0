"""`dsc kernels`: which GPU kernels exist, what they cost on an architecture, and how fast they should be.

Everything here is computed from compiled code and declared device figures, on any machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from dsc.bundle_schema.errors import HostError, RequestError
from dsc.kernels.aot import compile_kernels, default_cache
from dsc.kernels.gpu_targets import ARCHITECTURES, Architecture, architecture
from dsc.kernels.kernel_table import KERNELS, all_variants
from dsc.kernels.kernel_variant import KernelVariant
from dsc.kernels.launch_record import LaunchRecord

_WARP_REGISTERS = 256  # registers are given to warps in units of this many
_RESERVED_SHARED = 1024  # bytes that CUDA keeps of each block's shared memory


@dataclass(frozen=True)
class KernelLine:
    """One kernel of the table and its declared variants on one architecture."""

    kernel: str
    meaning: str
    variants: tuple[str, ...]


@dataclass(frozen=True)
class Occupancy:
    """How many blocks of a kernel fit one multiprocessor at once and which resource ends first."""

    blocks: int
    warps: int
    share: float
    limit: str


@dataclass(frozen=True)
class KernelSheet:
    """One compiled variant and what it should cost for given axes.

    `nbytes` and `flops` are those of an ideal implementation; `roofline_us` is the time that the reference
    card's declared bandwidth and rate allow; nothing here was measured.
    """

    record: LaunchRecord
    occupancy: Occupancy | None
    card: str
    axes: Mapping[str, int]
    nbytes: int
    flops: int
    roofline_us: float
    bound: str


def list_kernels(arch: str) -> tuple[KernelLine, ...]:
    """Every kernel with its variants on `arch`.

    Raises:
        KernelError: the architecture is unknown.
    """
    variants = all_variants(architecture(arch).name)
    return tuple(
        KernelLine(kernel, meaning, tuple(variant.name for variant in variants if variant.kernel == kernel))
        for kernel, meaning in KERNELS.items()
    )


def find_variant(name: str, arch: str) -> KernelVariant:
    """A variant by its name, or the first of a kernel.

    Raises:
        KernelError: the architecture is unknown.
        RequestError: nothing has that name; the message lists kernels or similar variants.
    """
    variants = all_variants(architecture(arch).name)
    for variant in variants:
        if name in (variant.name, variant.kernel):
            return variant
    near = [variant.name for variant in variants if name in variant.name][:8]
    raise RequestError(name, f"no kernel or variant of {arch} has this name", f"known: {', '.join(near or KERNELS)}")


def show_kernel(name: str, arch: str, axes: Mapping[str, int], *, cache: Path | None = None) -> KernelSheet:
    """Compile a variant (or take it from the cache) and work out its sheet.

    Args:
        name: of a variant or a kernel.
        arch: the build target.
        axes: sizes; those not given have the defaults of a decoding step.
        cache: directory of compiled kernels; None is the user's.

    Raises:
        KernelError, HostError: as `compile_kernels`.
        RequestError: the name or an axis is unknown.
    """
    variant = find_variant(name, arch)
    (kernel,) = compile_kernels([variant], arch, cache=cache or default_cache(), workers=1)
    sizes = _sizes(variant, axes)
    nbytes, flops = _cost(variant, sizes)
    card = architecture(arch).reference
    memory, compute = nbytes / card.bandwidth * 1e6, flops / card.tensor_rate * 1e6
    return KernelSheet(
        record=kernel.record,
        occupancy=occupancy(kernel.record, ARCHITECTURES[arch]),
        card=card.name,
        axes=sizes,
        nbytes=nbytes,
        flops=flops,
        roofline_us=max(memory, compute),
        bound="memory" if memory >= compute else "compute",
    )


def occupancy(record: LaunchRecord, arch: Architecture) -> Occupancy | None:
    """Blocks a multiprocessor holds, from registers, shared memory, threads and block slots.

    None where the compiler reports no registers (PTX and AMD images).
    """
    if record.resources is None:
        return None
    warps = record.num_warps
    registers = ceil(record.resources.registers * record.warp_size / _WARP_REGISTERS) * _WARP_REGISTERS * warps
    limits = {
        "registers": arch.registers_per_multiprocessor // max(registers, 1),
        "shared memory": arch.shared_per_multiprocessor // (record.shared + _RESERVED_SHARED),
        "threads": arch.threads_per_multiprocessor // record.threads,
        "block slots": arch.blocks_per_multiprocessor,
    }
    limit = min(limits, key=lambda name: limits[name])
    blocks = limits[limit]
    most = arch.threads_per_multiprocessor // record.warp_size
    return Occupancy(blocks=blocks, warps=blocks * warps, share=blocks * warps / most, limit=limit)


_DEFAULT_AXES = {
    "dspark_verify_head_tiled": {"batch": 1, "kv_heads": 8, "groups": 4, "rows": 5, "length": 4096},
    "dspark_verify_join_parts": {"batch": 1, "q_heads": 32, "rows": 5, "parts": 8},
    "dspark_speculative_verify": {"batch": 1, "rows": 5, "vocab": 151_936},
    "dspark_kv_commit": {"batch": 1, "pools": 64, "kv_heads": 8, "steps": 5},
    "dspark_kv_rollback": {"entries": 1, "pools": 64, "kv_heads": 8, "steps": 4},
    "dspark_markov_walk": {"batch": 1, "n": 7, "k": 16},
}


def _sizes(variant: KernelVariant, axes: Mapping[str, int]) -> dict[str, int]:
    """Defaults overridden by the given axes."""
    defaults = _DEFAULT_AXES[variant.kernel]
    for axis, size in axes.items():
        if axis not in defaults:
            raise RequestError(f"--axes {axis}", f"{variant.kernel} has no such axis", f"it has {', '.join(defaults)}")
        if size < 1:
            raise RequestError(f"--axes {axis}", f"at least 1 is required, got {size}")
    return {**defaults, **axes}


def _cost(variant: KernelVariant, sizes: Mapping[str, int]) -> tuple[int, int]:
    """(bytes, floating point operations) that an ideal implementation needs."""
    head = int(variant.constants.get("HEAD_SIZE", 0))
    if variant.kernel == "dspark_verify_head_tiled":
        element = 1 if variant.constants["QUANTISED"] else 2
        heads, rows = sizes["batch"] * sizes["kv_heads"], sizes["rows"]
        pool = 2 * heads * sizes["length"] * head * element
        queries = 2 * 2 * heads * sizes["groups"] * rows * head
        new = 2 * heads * rows * head * (2 + element)
        return pool + queries + new, 4 * heads * sizes["groups"] * rows * (sizes["length"] + rows) * head
    if variant.kernel == "dspark_verify_join_parts":
        rows = sizes["batch"] * sizes["q_heads"] * sizes["rows"]
        return rows * (sizes["parts"] * (4 * head + 8) + 2 * head), 2 * rows * sizes["parts"] * head
    if variant.kernel == "dspark_speculative_verify":
        logits = sizes["batch"] * sizes["rows"] * sizes["vocab"]
        return 4 * logits, logits
    if variant.kernel == "dspark_markov_walk":
        steps = sizes["batch"] * sizes["n"] * sizes["k"]
        return steps * 16, 6 * steps
    element = 1 if variant.constants.get("ELEMENT") == "int8" else 2
    slots = sizes.get("batch", sizes.get("entries", 1))
    moved = slots * sizes["pools"] * sizes["kv_heads"] * sizes["steps"] * head * element
    return (2 * moved if variant.kernel == "dspark_kv_commit" else moved) or 12 * slots, 0


def require_gpu() -> None:
    """Refuse to measure where nothing can be measured.

    Raises:
        HostError: there is no usable CUDA driver and device.
    """
    from dsc.runtime.cuda_driver import CudaDriver

    try:
        CudaDriver().close()
    except HostError as error:
        raise HostError(
            "dsc kernels bench", f"a CUDA GPU is required: {error.what}", "dsc kernels show works without one"
        ) from error
