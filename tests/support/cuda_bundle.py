"""A tiny `.dsmodel` for CUDA: half-precision graphs and compiled kernels, made without the exporter."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import forward_graphs
import onnx_ir as ir
from forward_graphs import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, N_LAYERS, VOCAB
from toy_bundle import toy_info, write_bundle

from dsc.bundle_schema.dflash_config import DflashConfig, Proposer
from dsc.bundle_schema.model_info import KvLayer
from dsc.bundle_schema.tensors import DType
from dsc.kernels.aot import compile_kernels, default_cache
from dsc.kernels.attention_table import join_variant, tiled_variant
from dsc.kernels.gpu_targets import architecture
from dsc.kernels.verify_table import cutoff_variant, greedy_variant, sampled_variant, stats_variant
from dsc.passes.pass_order import Kernels, Precision, default_pipeline
from dsc.passes.pipeline import run_pipeline

ARCH = "sm_90"
MAX_LENGTH = 96


def cuda_bundle(
    path: Path,
    draft: bool = False,
    with_kernels: bool = True,
    precision: Precision = "fp32",
    secure: bool = False,
    native: bool = False,
    max_length: int = MAX_LENGTH,
    vocab: int = VOCAB,
) -> Path:
    """A bundle whose CUDA graphs are random models and whose kernels are those of the verdict.

    Args:
        native: a second graph of the target, whose attention the bundle's kernels run; heads of 64, which they need.
    """
    head_dim = 64 if native else HEAD_DIM
    dtype = "bfloat16" if precision == "bf16" else "float16"
    variants = verdict_variants()
    if native:
        tiles = (tiled_variant(64, dtype, rows, architecture(ARCH)) for rows in (16, 128))
        variants += (*tiles, join_variant(64, dtype))
    kernels = compile_kernels(variants, ARCH, cache=default_cache()) if with_kernels else ()
    info = toy_info(vocab, max_length, (), (KvLayer(n_kv_heads=KV_HEADS, head_dim=head_dim),) * N_LAYERS)
    info = info.model_copy(update={"kv_dtype": DType(dtype), "hidden_size": HIDDEN, "n_heads": HEADS})
    options = {"native": cuda_graph(0, precision, "cuda_native", head_dim, vocab)} if native else {}
    if draft:
        options |= {
            "draft": cuda_graph(1, precision, "cuda", head_dim, vocab),
            "draft_info": info,
            "draft_kind": "self",
        }
    proposers = {kind: Proposer() for kind in (("ngram", "self") if draft else ("ngram",))}
    config = DflashConfig(proposers=proposers, secure_rollback=secure)
    target = cuda_graph(0, precision, "cuda", head_dim, vocab)
    return write_bundle(path, target, info, backend="cuda", kernels=kernels, config=config, **options)


def verdict_variants():
    """The kernels of the verdict that the runtime launches."""
    return (
        *(stats_variant(sums=sums) for sums in (False, True)),
        *(sampled_variant("point_mass", truncated=cut) for cut in (False, True)),
        greedy_variant(),
        cutoff_variant(),
    )


def cuda_graph(seed: int, precision: Precision, kernels: Kernels, head_dim: int, vocab: int):
    """A forward graph through the passes for CUDA."""
    with patch.multiple(forward_graphs, HEAD_DIM=head_dim, VOCAB=vocab):
        model = forward_graphs.forward_graph(seed)
    run_pipeline(model, default_pipeline(kernels, precision))
    return ir.to_proto(model)
