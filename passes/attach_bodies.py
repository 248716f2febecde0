"""Function bodies for the project's own operators, so that any onnxruntime opens the graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar, Literal

import onnx_ir as ir

from dsc.bundle_schema.errors import PassError
from dsc.passes.base import GraphPass, PassResult
from dsc.passes.graph_edit import DSPARK

BODIES: dict[str, str] = {
    "BlockMatMul": "dsc.kernels.block_matmul",
    "Experts": "dsc.kernels.experts",
    "VerifyAttention": "dsc.kernels.verify_attention",
}
"""Operator of the `ai.dspark` domain -> module whose ``function_body(backend)`` makes its body."""


@dataclass(frozen=True)
class AttachBodiesPass(GraphPass):
    """Register a model-local function for every `ai.dspark` operator that the graph still uses.

    ::

        graph { y = ai.dspark::BlockMatMul(x, q, s) }
        ->
        graph { y = ai.dspark::BlockMatMul(x, q, s) }, function ai.dspark::BlockMatMul { ... standard operators ... }

    onnxruntime inlines the function unless a loaded library implements the operator, so one graph serves both.

    Rules:
        1. An operator in use gets its body once; one that has a body keeps it.
        2. The opsets that a body uses are imported by the model as well.
    """

    name: ClassVar[str] = "attach-bodies"

    backend: Literal["cpu", "cuda"] = "cpu"

    def call(self, model: ir.Model) -> PassResult:
        """Attach what is missing."""
        attached = 0
        for operator in sorted(_without_body(model)):
            if operator not in BODIES:
                raise PassError(f"operator {DSPARK}::{operator}", "has no function body", f"known: {sorted(BODIES)}")
            body: ir.Function = import_module(BODIES[operator]).function_body(self.backend)
            model.functions[body.identifier()] = body
            for domain, version in body.opset_imports.items():
                model.graph.opset_imports.setdefault(domain, version)
            attached += 1
        return PassResult(attached)

    def ensures(self, model: ir.Model) -> None:
        """Every `ai.dspark` operator has a body."""
        for operator in _without_body(model):
            raise PassError(f"operator {DSPARK}::{operator}", "was left without a function body")


def _without_body(model: ir.Model) -> set[str]:
    bodies = {(function.domain, function.name) for function in model.functions.values()}
    used = {node.op_type for node in _all_nodes(model) if node.domain == DSPARK}
    return {operator for operator in used if (DSPARK, operator) not in bodies}


def _all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()
