"""The declared table of kernel variants: what a bundle for a given model and architecture carries."""

from __future__ import annotations

from dsc.bundle_schema.errors import KernelError
from dsc.kernels.attention_table import DTYPES, HEAD_SIZES, attention_variants
from dsc.kernels.gpu_targets import Architecture, architecture
from dsc.kernels.kernel_variant import KernelVariant
from dsc.kernels.verify_table import pool_variants, verify_variants, walk_variants

KERNELS = {
    "dspark_verify_head_tiled": "K+1 rows attend to the pool in one pass, heads of a group packed into a tile",
    "dspark_verify_join_parts": "joins the parts of a KV that was split over programs",
    "dspark_speculative_verify": "logits to accepted count and next token, on the device",
    "dspark_kv_commit": "compacts the accepted path of a tree into contiguous rows",
    "dspark_kv_rollback": "replays the rollback journal; erases rejected rows on request",
    "dspark_markov_walk": "walks a block drafter's top-k lattice",
}
"""Kernel -> what it does."""


def variants_for_model(
    head_sizes: tuple[int, ...],
    dtype: str,
    arch: Architecture,
    *,
    softcap: bool = False,
    int8_pool: bool = False,
    markov: bool = False,
) -> tuple[KernelVariant, ...]:
    """The variants a model needs on one architecture, in the order in which a launcher tries them.

    Args:
        head_sizes: of all attention layers, target and draft.
        dtype: ``float16`` or ``bfloat16`` rows.
        arch: the build target.
        softcap: whether attention scores are soft-capped.
        int8_pool: whether the KV pool holds int8.
        markov: whether a block drafter is in the bundle.

    Raises:
        KernelError: the element type or a head size has no kernel; the message lists those that do.
    """
    if dtype not in DTYPES:
        raise KernelError("kernels", f"rows of {dtype} have no kernel", f"known: {', '.join(DTYPES)}")
    chosen: dict[str, KernelVariant] = {}
    for size in head_sizes:
        if size not in HEAD_SIZES:
            known = ", ".join(map(str, HEAD_SIZES))
            raise KernelError("kernels", f"head size {size} has no kernel", f"known: {known}")
        attention = attention_variants(size, dtype, arch, softcap=softcap, quantised=int8_pool)
        for variant in (*attention, *pool_variants(size, "int8" if int8_pool else dtype)):
            chosen[variant.name] = variant
    rest = (*verify_variants(), *(walk_variants() if markov else ()))
    return (*chosen.values(), *rest)


def all_variants(arch_name: str) -> tuple[KernelVariant, ...]:
    """Every variant that is declared for an architecture."""
    arch = architecture(arch_name)
    found: dict[str, KernelVariant] = {}
    for dtype in DTYPES:
        for softcap in (False, True):
            for int8_pool in (False, True):
                wanted = variants_for_model(HEAD_SIZES, dtype, arch, softcap=softcap, int8_pool=int8_pool, markov=True)
                found |= {variant.name: variant for variant in wanted}
    return tuple(found.values())
