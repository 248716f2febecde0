"""A tiny `.dsmodel` for CUDA: half-precision graphs and compiled kernels, made without the exporter."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from forward_graphs import HEAD_DIM, HIDDEN, KV_HEADS, N_LAYERS, VOCAB, forward_graph
from toy_bundle import toy_info, write_bundle

from dsc.bundle_schema.dflash_config import DflashConfig, Proposer
from dsc.bundle_schema.model_info import KvLayer
from dsc.bundle_schema.tensors import DType
from dsc.kernels.aot import compile_kernels, default_cache
from dsc.kernels.verify_table import cutoff_variant, greedy_variant, sampled_variant, stats_variant
from dsc.passes.pass_order import Precision, default_pipeline
from dsc.passes.pipeline import run_pipeline

ARCH = "sm_90"
MAX_LENGTH = 96


def cuda_bundle(
    path: Path, draft: bool = False, with_kernels: bool = True, precision: Precision = "fp32", secure: bool = False
) -> Path:
    """A bundle whose CUDA graphs are random models and whose kernels are those of the verdict."""
    variants = (
        *(stats_variant(sums=sums) for sums in (False, True)),
        *(sampled_variant("point_mass", truncated=cut) for cut in (False, True)),
        greedy_variant(),
        cutoff_variant(),
    )
    kernels = compile_kernels(variants, ARCH, cache=default_cache()) if with_kernels else ()
    info = toy_info(VOCAB, MAX_LENGTH, (), (KvLayer(n_kv_heads=KV_HEADS, head_dim=HEAD_DIM),) * N_LAYERS)
    kv_dtype = DType.BFLOAT16 if precision == "bf16" else DType.FLOAT16
    info = info.model_copy(update={"kv_dtype": kv_dtype, "hidden_size": HIDDEN})
    models = {"draft": cuda_graph(1, precision), "draft_info": info, "draft_kind": "self"} if draft else {}
    config = DflashConfig(
        proposers={"ngram": Proposer()} | ({"self": Proposer()} if draft else {}), secure_rollback=secure
    )
    target = cuda_graph(0, precision)
    return write_bundle(path, target, info, backend="cuda", kernels=kernels, config=config, **models)


def cuda_graph(seed: int, precision: Precision):
    """A forward graph through the passes for CUDA."""
    model = forward_graph(seed)
    run_pipeline(model, default_pipeline("cuda", precision))
    return ir.to_proto(model)
