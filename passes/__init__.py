"""Graph passes: onnx_ir in, onnx_ir out; `ALL_PASSES` names them, `default_pipeline` orders them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from dsc.passes.base import GraphPass
    from dsc.passes.block_quantisation import BlockWeights

Backend = Literal["cpu", "cuda"]
Precision = Literal["fp32", "fp16", "bf16", "int8", "int4"]

ALL_PASSES: dict[str, str] = {
    "attach-bodies": "dsc.passes.attach_bodies:AttachBodiesPass",
    "eliminate-common-subexpressions": "dsc.passes.eliminate_common_subexpressions:EliminateCommonSubexpressionsPass",
    "fold-constants": "dsc.passes.fold_constants:FoldConstantsPass",
    "fuse-rms-norm": "dsc.passes.fuse_rms_norm:FuseRmsNormPass",
    "fuse-skip-norm": "dsc.passes.fuse_skip_norm:FuseSkipNormPass",
    "lower-attention": "dsc.passes.lower_attention:LowerAttentionPass",
    "lower-block-matmul": "dsc.passes.lower_block_matmul:LowerBlockMatMulPass",
    "lower-experts": "dsc.passes.lower_experts:LowerExpertsPass",
    "merge-gate-up": "dsc.passes.merge_gate_up:MergeGateUpPass",
    "merge-qkv": "dsc.passes.merge_qkv:MergeQkvPass",
    "name-sanity": "dsc.passes.name_sanity:NameSanityPass",
    "quantize-embedding": "dsc.passes.quantize_embedding:QuantizeEmbeddingPass",
    "quantize-weights": "dsc.passes.quantize_weights:QuantizeWeightsPass",
    "remove-unused": "dsc.passes.remove_unused:RemoveUnusedPass",
    "select-logit-rows": "dsc.passes.select_logit_rows:SelectLogitRowsPass",
    "share-initializers": "dsc.passes.share_initializers:ShareInitializersPass",
    "stamp-versions": "dsc.passes.stamp_versions:StampVersionsPass",
    "to-bfloat16": "dsc.passes.to_bfloat16:ToBfloat16Pass",
    "to-float16": "dsc.passes.to_float16:ToFloat16Pass",
}
"""Every pass by its name, as ``module:Class``; the modules are imported when a pass is asked for."""

_LONGEST_ROTARY_TABLE = 32768
"""Positions. A longer table costs more memory than the nodes it replaces cost time."""

_BLOCK_PRECISIONS = ("int8", "int4")


def default_pipeline(
    backend: Backend = "cpu",
    precision: Precision = "fp32",
    *,
    native: bool = False,
    max_positions: int = 8192,
    block_weights: Mapping[str, BlockWeights] | None = None,
    quantize: Mapping[str, Any] | None = None,
) -> tuple[GraphPass, ...]:
    """The passes that make a forward graph fast on `backend`, in order; docs/decisions/002-cpu-passes.md says why.

    Args:
        native: leave BlockMatMul to the native library; its function body serves where the library is absent.
        max_positions: how many positions the runtime will ever use.
        block_weights: matrices that are blocks already, by initializer name; used when `precision` is int8 or int4.
        quantize: further options of quantize-weights.

    Raises:
        RequestError: an option of quantize-weights is out of range.
    """
    from dsc.passes.pipeline import parse_pipeline

    rotary = f"fold_rotary={max_positions <= _LONGEST_ROTARY_TABLE},max_positions={max_positions}"
    half = {"fp16": "to-float16", "bf16": "to-bfloat16"}.get(precision, "to-float16" if backend == "cuda" else "")
    phases: tuple[str | GraphPass, ...] = (
        # what the graph says
        "fold-constants,fuse-rms-norm,select-logit-rows,eliminate-common-subexpressions",
        # what its weights are
        *_quantisation(precision, block_weights, quantize),
        # which operators compute it
        f"lower-attention{{{rotary}}},lower-experts,fuse-skip-norm",
        "merge-qkv,merge-gate-up" if precision in _BLOCK_PRECISIONS else "",
        "" if native else "lower-block-matmul",
        half,
        # what is written
        "remove-unused,name-sanity,attach-bodies,stamp-versions",
    )
    passes: list[GraphPass] = []
    for phase in phases:
        passes += parse_pipeline(phase) if isinstance(phase, str) else (phase,)
    return tuple(passes)


def _quantisation(
    precision: Precision, block_weights: Mapping[str, BlockWeights] | None, quantize: Mapping[str, Any] | None
) -> tuple[GraphPass, ...]:
    if precision not in _BLOCK_PRECISIONS:
        return ()
    from dsc.passes.quantize_embedding import QuantizeEmbeddingPass
    from dsc.passes.quantize_weights import QuantizeWeightsPass

    options = {"bits": 8 if precision == "int8" else 4, "block_weights": block_weights or {}, **(quantize or {})}
    return QuantizeWeightsPass(**options), QuantizeEmbeddingPass()
