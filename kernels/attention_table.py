"""The declared configurations of the verification attention kernels, per architecture.

A configuration is chosen at launch by the number of packed query rows (query heads of a group times new rows):
the smallest tile that holds them, because a decode step is bound by memory and wasted rows cost registers. The
default tile for many rows is 128 x 128; head sizes and architectures whose shared memory does not hold it use
fewer keys at a time.
"""

from __future__ import annotations

from dsc.kernels.gpu_targets import Architecture
from dsc.kernels.kernel_variant import KernelVariant
from dsc.kernels.launch_record import GridFactor

HEAD_SIZES = (64, 80, 96, 128, 256)
DTYPES = {"float16": "fp16", "bfloat16": "bf16"}
MAX_NEW_ROWS = 32
MAX_PARTS = 64


def _padded(head_size: int) -> int:
    """The head size rounded up to a power of two, which tiles must have."""
    return 1 << (head_size - 1).bit_length()


def tile_keys(head_size: int, rows: int, arch: Architecture, *, softcap: bool = False, quantised: bool = False) -> int:
    """Keys a tile: 128 where registers and shared memory hold it, else fewer.

    Found by compiling every configuration and looking for spills: a 128 x 128 tile stays in registers up to head
    size 64 only, unpacking int8 takes registers too, and so does sm_86's and its relatives' smaller shared memory.
    A softcap takes a few more than are left of sm_80's tall tiles of padded head sizes and of sm_86's largest. AMD's
    compiler keeps half as many keys of a tall tile in registers, and of an int8 one of 32 rows at head size 256.
    """
    padded = _padded(head_size)
    keys = 128 // ((2 if quantised else 1) * (2 if rows >= 128 and padded > 64 else 1))
    if (rows >= 128 and arch.shared_per_block < 128 * 1024) or (quantised and padded > 128):
        keys //= 2
    small = arch.backend == "cuda" and arch.shared_per_block < 128 * 1024
    if softcap and ((rows >= 128 and padded != head_size) or (small and rows * keys > 64 * 64)):
        keys //= 2
    if arch.backend == "hip" and rows >= 64:
        keys //= 4 if padded > 128 else 2
    if arch.backend == "hip" and quantised and padded > 128 and rows == 32:
        keys //= 2
    budget = arch.shared_per_block - 2 * rows * padded
    while keys > 16 and 2 * 2 * 2 * padded * keys > budget:
        keys //= 2
    return keys


def tile_rows(head_size: int, arch: Architecture, *, quantised: bool = False) -> tuple[int, ...]:
    """Tile heights on offer; the last serves any number of packed rows."""
    padded = _padded(head_size)
    if padded > 128 and quantised and arch.name not in ("sm_90", "sm_100"):
        return (16, 32)
    widest = 128 if arch.shared_per_block >= 128 * 1024 else 64
    return (16, 64, 128) if padded <= widest else (16, 64)


def _signature(dtype: str, quantised: bool) -> tuple[tuple[str, str], ...]:
    """Run-time arguments of the tiled kernel for fp16 or bf16 rows and a pool of the same type or int8."""
    rows, pool = f"*{DTYPES[dtype]}", "*i8" if quantised else f"*{DTYPES[dtype]}"
    pointers = {"q_ptr": rows, "k_ptr": rows, "v_ptr": rows, "k_pool_ptr": pool, "v_pool_ptr": pool}
    pointers |= {"past_ptr": "*i32", "sinks_ptr": "*fp32", "tree_ptr": "*i8"}
    pointers |= {"k_scale_ptr": "*fp32", "v_scale_ptr": "*fp32"}
    pointers |= {"o_ptr": rows, "part_ptr": "*fp32", "stat_ptr": "*fp32"}
    integers = ("S", "pool_rows", "kv_heads", "groups", "window", "has_sinks", "has_tree")
    return (*pointers.items(), *((name, "i32") for name in integers), ("scale", "fp32"), ("cap", "fp32"))


def tiled_variant(
    head_size: int, dtype: str, rows: int, arch: Architecture, *, softcap: bool = False, quantised: bool = False
) -> KernelVariant:
    """The tiled kernel for tiles of `rows` packed query rows."""
    keys = tile_keys(head_size, rows, arch, softcap=softcap, quantised=quantised)
    kind = ("_i8" if quantised else "") + ("_cap" if softcap else "")
    return KernelVariant(
        kernel="dspark_verify_head_tiled",
        name=f"verify_head_tiled_{DTYPES[dtype]}_d{head_size}{kind}_{rows}x{keys}",
        module="attention_triton",
        function="verify_head_tiled",
        signature=_signature(dtype, quantised),
        constants={
            "HEAD_SIZE": head_size,
            "BLOCK_D": _padded(head_size),
            "BLOCK_M": rows,
            "BLOCK_N": keys,
            "BLOCK_S": MAX_NEW_ROWS,
            "SOFTCAP": softcap,
            "QUANTISED": quantised,
        },
        divisible_by_16=("q_ptr", "k_ptr", "v_ptr", "k_pool_ptr", "v_pool_ptr", "o_ptr", "part_ptr"),
        grid=(
            (GridFactor(axis="packed_rows", per=rows),),
            (GridFactor(axis="batch"), GridFactor(axis="kv_heads")),
            (GridFactor(axis="parts"),),
        ),
        equals={
            "head_size": head_size,
            "dtype": dtype,
            "pool_dtype": "int8" if quantised else dtype,
            "softcap": int(softcap),
        },
        at_most={"rows": MAX_NEW_ROWS, "parts": MAX_PARTS}
        | ({"packed_rows": rows} if rows != tile_rows(head_size, arch, quantised=quantised)[-1] else {}),
        num_warps=4 if rows == 16 else 8,
        num_stages=2,
        max_registers=255,
        uses_tensor_cores=True,
    )


def join_variant(head_size: int, dtype: str) -> KernelVariant:
    """The kernel that joins the parts of a split KV."""
    signature = {"part_ptr": "*fp32", "stat_ptr": "*fp32", "sinks_ptr": "*fp32", "o_ptr": f"*{DTYPES[dtype]}"}
    return KernelVariant(
        kernel="dspark_verify_join_parts",
        name=f"verify_join_parts_{DTYPES[dtype]}_d{head_size}",
        module="attention_triton",
        function="join_parts",
        signature=(*signature.items(), *((name, "i32") for name in ("parts", "S", "q_heads", "has_sinks"))),
        constants={"HEAD_SIZE": head_size, "BLOCK_D": _padded(head_size), "BLOCK_P": MAX_PARTS},
        divisible_by_16=("part_ptr", "o_ptr"),
        grid=(
            (GridFactor(axis="batch"), GridFactor(axis="q_heads"), GridFactor(axis="rows")),
            (),
            (),
        ),
        equals={"head_size": head_size, "dtype": dtype},
        at_most={"parts": MAX_PARTS},
        num_warps=4,
        num_stages=1,
    )


def attention_variants(
    head_size: int, dtype: str, arch: Architecture, *, softcap: bool = False, quantised: bool = False
) -> tuple[KernelVariant, ...]:
    """Every attention kernel that a model with this head size and element type needs, smallest tile first."""
    tiles = (
        tiled_variant(head_size, dtype, rows, arch, softcap=softcap, quantised=quantised)
        for rows in tile_rows(head_size, arch, quantised=quantised)
    )
    return (*tiles, join_variant(head_size, dtype))
