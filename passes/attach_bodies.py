"""Function bodies for the project's own operators, so that any onnxruntime opens the graph."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar

import onnx_ir as ir

from dsc.bundle_schema.errors import PassError
from dsc.passes.base import GraphPass, PassResult
from dsc.passes.graph_edit import DSPARK

BODIES: dict[str, str] = {
    "BlockMatMul": "dsc.kernels.block_matmul",
    "DenseMatMul": "dsc.kernels.dense_matmul",
    "DenseMatMulSkipNorm": "dsc.kernels.matmul_skip_norm",
    "Experts": "dsc.kernels.experts",
    "Int16Gather": "dsc.kernels.int16_gather",
    "Int16MatMul": "dsc.kernels.int16_matmul",
    "Int16MatMulSkipNorm": "dsc.kernels.matmul_skip_norm",
    "InterleavedGather": "dsc.kernels.interleaved_gather",
    "InterleavedMatMul": "dsc.kernels.interleaved_matmul",
    "InterleavedMatMulSkipNorm": "dsc.kernels.matmul_skip_norm",
    "QkvAttention": "dsc.kernels.qkv_attention",
    "SwiGlu": "dsc.kernels.swiglu",
    "KvCommit": "dsc.kernels.kv_ops",
    "KvRollback": "dsc.kernels.kv_ops",
    "SpeculativeVerify": "dsc.kernels.speculative_verify",
    "VerifyAttention": "dsc.kernels.verify_attention_body",
}
"""Operator of the `ai.dspark` domain -> module whose ``function_for(node)`` makes the body that fits a node."""


@dataclass(frozen=True)
class AttachBodiesPass(GraphPass):
    """Register a model-local function for every `ai.dspark` node that the graph still has.

    ::

        graph { y = ai.dspark::BlockMatMul(x, q, s) }
        ->
        graph { y = ai.dspark::BlockMatMul:plain(x, q, s) }, function ai.dspark::BlockMatMul:plain { ... }

    onnxruntime inlines the function unless a loaded library implements the operator, so one graph serves both.

    Rules:
        1. A node gets the overload of its operator that its optional inputs and attributes call for.
        2. An overload in use gets its body once; one that has a body keeps it.
        3. The opsets that a body uses are imported by the model as well.
    """

    name: ClassVar[str] = "attach-bodies"

    def call(self, model: ir.Model) -> PassResult:
        """Attach what is missing."""
        attached = 0
        for node in model.graph.all_nodes():
            if node.domain != DSPARK or node.op_identifier() in model.functions:
                continue
            body = _body_for(node)
            node.overload = body.overload
            if body.identifier() in model.functions:
                continue
            model.functions[body.identifier()] = body
            for domain, version in body.opset_imports.items():
                model.graph.opset_imports.setdefault(domain, version)
            attached += 1
        return PassResult(attached)

    def ensures(self, model: ir.Model) -> None:
        """Every `ai.dspark` node has a body."""
        for node in model.graph.all_nodes():
            if node.domain == DSPARK and node.op_identifier() not in model.functions:
                raise PassError(f"node {node.name!r}", f"{node.op_type} was left without a function body")


def _body_for(node: ir.Node) -> ir.Function:
    if node.op_type not in BODIES:
        raise PassError(f"operator {DSPARK}::{node.op_type}", "has no function body", f"known: {', '.join(BODIES)}")
    body: ir.Function = import_module(BODIES[node.op_type]).function_for(node)
    return body
