"""Which GPU kernels a pair of models needs, compiled for the architectures that the request names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dsc.bundle_schema.errors import KernelError
from dsc.compiler.console import format_nbytes
from dsc.kernels.aot import CompiledKernel, compile_jobs, default_cache, n_cached
from dsc.kernels.kernel_table import variants_for_model
from dsc.passes.graph_edit import DSPARK, MICROSOFT, attribute, is_op

if TYPE_CHECKING:
    import onnx_ir as ir

    from dsc.bundle_schema.model_info import ModelInfo
    from dsc.kernels.gpu_targets import Architecture
    from dsc.kernels.kernel_variant import KernelVariant

KERNEL_DTYPE = "float16"
"""Rows and pools of the CUDA graphs. float32 attention does not exist in onnxruntime's CUDA provider."""


# What a kernel takes where none is in the cache: the mean over one model's kernels on all architectures.
_SECONDS, _NBYTES = 1.5, 40_000


@dataclass(frozen=True, order=True)
class AttentionNeed:
    """A kind of attention layer that needs kernels of its own; `softcap`: its scores are soft-capped."""

    head_size: int
    softcap: bool


@dataclass(frozen=True)
class GpuKernels:
    """The compiled kernels of a bundle; `left_out` names those that do not exist, each with the reason."""

    kernels: tuple[CompiledKernel, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)

    def made_by(self) -> dict[str, str]:
        """Compiler and assemblers -> versions."""
        records = [kernel.record for kernel in self.kernels]
        made = {"triton": {record.triton_version for record in records}}
        made["ptxas"] = {record.assembler_version for record in records if record.assembler_version}
        return {tool: ", ".join(sorted(versions)) for tool, versions in made.items() if versions}


def attention_needs(models: Iterable[tuple[ModelInfo, ir.Model]]) -> tuple[AttentionNeed, ...]:
    """The kinds of attention layers of models, each with one of its graphs."""
    return tuple(
        sorted(
            {
                AttentionNeed(layer.head_dim, any(_is_capped(node) for node in model.graph))
                for info, model in models
                for layer in info.kv_layers
            }
        )
    )


def _is_capped(node: ir.Node) -> bool:
    attention = is_op(node, "GroupQueryAttention", MICROSOFT) or is_op(node, "VerifyAttention", DSPARK)
    return attention and attribute(node, "softcap", 0.0) > 0


def needed_variants(
    needs: Sequence[AttentionNeed], arch: Architecture
) -> tuple[tuple[KernelVariant, ...], dict[str, str]]:
    """The variants for one architecture, and the needs that no kernel serves with the reason.

    The verdict's kernels serve every model; attention and pool kernels exist for some head sizes.
    """
    chosen = {variant.name: variant for variant in variants_for_model((), KERNEL_DTYPE, arch)}
    left_out = {}
    for need in needs:
        try:
            found = variants_for_model((need.head_size,), KERNEL_DTYPE, arch, softcap=need.softcap)
        except KernelError as error:
            left_out[f"attention and pool kernels, head size {need.head_size}"] = f"{error.what}; {error.hint}"
        else:
            chosen |= {variant.name: variant for variant in found}
    return tuple(chosen.values()), left_out


def compile_gpu_kernels(needs: Sequence[AttentionNeed], targets: Sequence[Architecture], workers: int) -> GpuKernels:
    """Compile what the models need for every architecture, from the user's cache where possible.

    Raises:
        KernelError: a kernel does not compile.
        HostError: Triton is missing or has another version, or the cache cannot be written.
    """
    if not targets:
        return GpuKernels()
    jobs, left_out = _jobs(needs, targets)
    return GpuKernels(tuple(compile_jobs(jobs, cache=default_cache(), workers=workers)), left_out)


def estimate(needs: Sequence[AttentionNeed], targets: Sequence[Architecture], workers: int) -> dict[str, str]:
    """What `compile_gpu_kernels` would do, from table and cache: number, time and size, and what is left out."""
    jobs, left_out = _jobs(needs, targets)
    cached = n_cached(jobs, default_cache())
    seconds = _SECONDS * (len(jobs) - cached) / workers
    return {
        "kernels": f"{len(jobs)} for {', '.join(target.name for target in targets)}, {cached} of them in the cache",
        "time about": f"{seconds:.0f} s with {workers} processes",
        "size about": format_nbytes(_NBYTES * len(jobs)),
        **{f"no {kernels}": why for kernels, why in left_out.items()},
    }


def _jobs(
    needs: Sequence[AttentionNeed], targets: Sequence[Architecture]
) -> tuple[list[tuple[KernelVariant, Architecture]], dict[str, str]]:
    jobs = []
    left_out: dict[str, str] = {}
    for target in targets:
        variants, missing = needed_variants(needs, target)
        jobs += [(variant, target) for variant in variants]
        left_out |= missing
    return jobs, left_out
