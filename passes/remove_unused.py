"""Remove what no output needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

from dsc.passes.base import GraphPass, PassResult


@dataclass(frozen=True)
class RemoveUnusedPass(GraphPass):
    """Remove nodes, initializers, functions and opset imports that nothing uses.

    ::

        a = Neg(x); y = Relu(x); return y  ->  y = Relu(x); return y

    Rules:
        1. A node whose outputs nobody reads goes, and then what only fed it.
        2. An initializer, function or opset import that no node refers to goes.
        3. Graph inputs stay: they are the interface.
    """

    name: ClassVar[str] = "remove-unused"

    def call(self, model: ir.Model) -> PassResult:
        """Remove, and count what went."""
        before = _size(model)
        RemoveUnusedNodesPass()(model)
        RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
        RemoveUnusedOpsetsPass()(model)
        return PassResult(before - _size(model))


def _size(model: ir.Model) -> int:
    graph = model.graph
    return len(graph) + len(graph.initializers) + len(model.functions) + len(model.opset_imports)
