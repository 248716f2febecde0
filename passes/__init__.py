"""Graph passes: onnx_ir in, onnx_ir out; `ALL_PASSES` names them, `default_pipeline` orders them."""

from __future__ import annotations

ALL_PASSES: dict[str, str] = {
    "eliminate-common-subexpressions": (
        "dsc.passes.eliminate_common_subexpressions:EliminateCommonSubexpressionsPass"
    ),
    "fold-constants": "dsc.passes.fold_constants:FoldConstantsPass",
    "lower-attention": "dsc.passes.lower_attention:LowerAttentionPass",
}
"""Every pass by its name, as ``module:Class``; the modules are imported when a pass is asked for."""
