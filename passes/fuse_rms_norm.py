"""A root-mean-square normalisation spelled out, as one operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir
from onnxscript.rewriter.rules.fusion._rms_normalization import rms_normalization_ruleset

from dsc.passes.base import GraphPass, PassResult, Reason
from dsc.passes.graph_edit import is_op


@dataclass(frozen=True)
class FuseRmsNormPass(GraphPass):
    """Recognise RMSNormalization in graphs exported to older opsets or without optimisation.

    ::

        r = Reciprocal(Sqrt(Add(ReduceMean(Pow(x, 2), [-1]), eps))); y = Mul(Mul(x, r), g)
        ->
        y = RMSNormalization(x, g, axis=-1, epsilon=eps, stash_type=float32)

    Rules:
        1. The factors may come in either order, and casts to float32 around the mean are absorbed: the operator
           sums squares in float32 whatever the type of x.
        2. The graph's opset has the operator, i.e. it is at least 23.
    """

    name: ClassVar[str] = "fuse-rms-norm"

    def call(self, model: ir.Model) -> PassResult:
        """Fuse every match."""
        if model.opset_imports.get("", 0) < 23:
            return PassResult(0, (Reason("2", "opset", f"required at least 23, got {model.opset_imports.get('')}"),))
        fired = rms_normalization_ruleset.apply_to_model(model)
        left = [node for node in model.graph if is_op(node, "Reciprocal") or is_op(node, "ReduceMean")]
        return PassResult(fired, tuple(Reason("1", str(node.name), "not the pattern above") for node in left))
