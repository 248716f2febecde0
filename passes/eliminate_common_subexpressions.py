"""Compute equal expressions once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass

from dsc.passes.base import GraphPass, PassResult


@dataclass(frozen=True)
class EliminateCommonSubexpressionsPass(GraphPass):
    """Let equal nodes share one result.

    ::

        c1 = Cos(a); c2 = Cos(a); q = Rotary(x, c1); k = Rotary(y, c2)
        ->
        c1 = Cos(a);              q = Rotary(x, c1); k = Rotary(y, c1)

    An exported decoder recomputes its rotary tables in every layer; this pass leaves one.

    Rules:
        1. Nodes with the same operator, inputs and attributes are merged into the first of them.
        2. Random operators and nodes with subgraphs are never merged.
    """

    name: ClassVar[str] = "eliminate-common-subexpressions"

    def call(self, model: ir.Model) -> PassResult:
        """Merge equal nodes in one walk: a merge makes its users' inputs equal before they are visited."""
        before = len(model.graph)
        CommonSubexpressionEliminationPass()(model)
        return PassResult(before - len(model.graph))
