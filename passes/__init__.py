"""Graph passes: onnx_ir in, onnx_ir out; `ALL_PASSES` names them, `pass_order` orders them."""

from __future__ import annotations

ALL_PASSES: dict[str, str] = {
    "attach-bodies": "dsc.passes.attach_bodies:AttachBodiesPass",
    "constant-shapes": "dsc.passes.constant_shapes:ConstantShapesPass",
    "eliminate-common-subexpressions": "dsc.passes.eliminate_common_subexpressions:EliminateCommonSubexpressionsPass",
    "fold-constants": "dsc.passes.fold_constants:FoldConstantsPass",
    "fuse-dense-matmul": "dsc.passes.fuse_dense_matmul:FuseDenseMatMulPass",
    "fuse-matmul-skip-norm": "dsc.passes.fuse_matmul_skip_norm:FuseMatMulSkipNormPass",
    "fuse-qkv-attention": "dsc.passes.fuse_qkv_attention:FuseQkvAttentionPass",
    "fuse-rms-norm": "dsc.passes.fuse_rms_norm:FuseRmsNormPass",
    "fuse-skip-norm": "dsc.passes.fuse_skip_norm:FuseSkipNormPass",
    "fuse-swiglu": "dsc.passes.fuse_swiglu:FuseSwigluPass",
    "interleave-columns": "dsc.passes.interleave_columns:InterleaveColumnsPass",
    "lengths-as-inputs": "dsc.passes.lengths_as_inputs:LengthsAsInputsPass",
    "lower-attention": "dsc.passes.lower_attention:LowerAttentionPass",
    "lower-block-matmul": "dsc.passes.lower_block_matmul:LowerBlockMatMulPass",
    "lower-experts": "dsc.passes.lower_experts:LowerExpertsPass",
    "merge-gate-up": "dsc.passes.merge_gate_up:MergeGateUpPass",
    "merge-qkv": "dsc.passes.merge_qkv:MergeQkvPass",
    "name-sanity": "dsc.passes.name_sanity:NameSanityPass",
    "pack-rows": "dsc.passes.pack_rows:PackRowsPass",
    "quantize-embedding": "dsc.passes.quantize_embedding:QuantizeEmbeddingPass",
    "quantize-weights": "dsc.passes.quantize_weights:QuantizeWeightsPass",
    "remove-unused": "dsc.passes.remove_unused:RemoveUnusedPass",
    "ring-pools": "dsc.passes.ring_pools:RingPoolsPass",
    "select-logit-rows": "dsc.passes.select_logit_rows:SelectLogitRowsPass",
    "separate-columns": "dsc.passes.separate_columns:SeparateColumnsPass",
    "share-initializers": "dsc.passes.share_initializers:ShareInitializersPass",
    "stamp-versions": "dsc.passes.stamp_versions:StampVersionsPass",
    "to-bfloat16": "dsc.passes.to_bfloat16:ToBfloat16Pass",
    "to-float16": "dsc.passes.to_float16:ToFloat16Pass",
    "weights-by-rows": "dsc.passes.weights_by_rows:WeightsByRowsPass",
    "weights-in-int16": "dsc.passes.weights_in_int16:WeightsInInt16Pass",
}
"""Every pass by its name, as ``module:Class``; the modules are imported when a pass is asked for."""
