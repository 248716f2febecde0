"""`dsc kernels`: which GPU kernels exist, what they cost on an architecture, and how fast they should be.

Everything here is computed from compiled code and declared device figures, on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path

from dsc.bundle_schema.errors import RequestError
from dsc.kernels.aot import compile_kernels, default_cache
from dsc.kernels.gpu_targets import ARCHITECTURES, Architecture, architecture
from dsc.kernels.kernel_table import KERNELS, all_variants
from dsc.kernels.kernel_variant import KernelVariant
from dsc.kernels.launch_record import LaunchRecord
from dsc.kernels.table import load_contract

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
    sizes = _sizes(variant, axes)
    (kernel,) = compile_kernels([variant], arch, cache=cache or default_cache(), workers=1)
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
            raise RequestError(f"--axis {axis}", f"{variant.kernel} has no such axis", f"it has {', '.join(defaults)}")
        if size < 1:
            raise RequestError(f"--axis {axis}", f"at least 1 is required, got {size}")
    return {**defaults, **axes}


def _cost(variant: KernelVariant, sizes: Mapping[str, int]) -> tuple[int, int]:
    """(bytes, floating point operations) of an ideal implementation: the contract's, for what one launch does of it."""
    if variant.function in _COSTS:
        return _COSTS[variant.function](sizes, int(variant.constants.get("HEAD_SIZE", 0)))
    contract, names, width = _CONTRACTS[variant.function]
    if variant.constants.get("QUANTISED"):
        contract, width = "VerifyAttentionInt8", 4  # it counts 16-bit rows and an int8 pool itself
    if variant.constants.get("ELEMENT") == "int8":
        width = 1
    axes = {axis: prod(sizes[name] for name in given.split()) for axis, given in names.items()}
    axes["D"] = int(variant.constants.get("HEAD_SIZE", 0))
    made = load_contract(contract)
    return made.nbytes(axes) * width // _FLOAT32, made.flops(axes)


_FLOAT32 = 4
# Function -> contract, its axes as products of the sheet's, and the bytes of an element of its float tensors.
_CONTRACTS: dict[str, tuple[str, dict[str, str], int]] = {
    "verify_head_tiled": (
        "VerifyAttention",
        {"B": "batch", "Hq": "kv_heads groups", "Hkv": "kv_heads", "S": "rows", "M": "length"},
        2,
    ),
    "kv_commit": ("KvCommit", {"B": "batch pools", "Hkv": "kv_heads", "P": "steps"}, 2),
    "kv_rollback": ("KvRollback", {"E": "entries"}, 4),
    "markov_walk": ("MarkovWalk", {"B": "batch", "n": "n", "k": "k"}, 4),
}


def _join_cost(sizes: Mapping[str, int], head: int) -> tuple[int, int]:
    rows = sizes["batch"] * sizes["q_heads"] * sizes["rows"]
    return rows * (sizes["parts"] * (4 * head + 8) + 2 * head), 2 * rows * sizes["parts"] * head


def _row_cost(sizes: Mapping[str, int], head: int) -> tuple[int, int]:
    """Statistics or cuts of rows: an ideal one reads each logit once."""
    logits = sizes["batch"] * sizes["rows"] * sizes["vocab"]
    return _FLOAT32 * logits, logits


def _accept_cost(sizes: Mapping[str, int], head: int) -> tuple[int, int]:
    """A draw: one row of each sequence."""
    return _FLOAT32 * sizes["batch"] * sizes["vocab"], 3 * sizes["batch"] * sizes["vocab"]


def _accept_greedy_cost(sizes: Mapping[str, int], head: int) -> tuple[int, int]:
    """A maximum and a token of each row, its draft, and the verdict."""
    rows = sizes["batch"] * sizes["rows"]
    return 8 * rows + 8 * rows + 20 * sizes["batch"], rows


def _erase_cost(sizes: Mapping[str, int], head: int) -> tuple[int, int]:
    rows = sizes["entries"] * sizes["pools"] * sizes["kv_heads"] * sizes["steps"]
    return 2 * rows * head, 0


_COSTS: dict[str, Callable[[Mapping[str, int], int], tuple[int, int]]] = {
    "join_parts": _join_cost,
    "row_stats": _row_cost,
    "row_cutoff": _row_cost,
    "accept_greedy": _accept_greedy_cost,
    "accept_sampled": _accept_cost,
    "accept_tree": _accept_cost,
    "kv_erase": _erase_cost,
}
