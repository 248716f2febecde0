"""One product for the two halves of a gated feed-forward layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from dsc.passes.base import GraphPass, PassResult, Reason
from dsc.passes.graph_edit import (
    DSPARK,
    MICROSOFT,
    drop_unused_initializers,
    is_op,
    producer,
)
from dsc.passes.merge_products import merge_products, product_below, why_not_mergeable, width

_ACTIVATIONS = ("Sigmoid", "Mul", "Gelu", "Swish", "Relu", "QuickGelu", "Tanh")


@dataclass(frozen=True)
class MergeGateUpPass(GraphPass):
    """Compute gate and up projection in one product and split the result.

    ::

        g = x Wg; u = x Wu; h = Mul(act(g), u)  ->  g, u = Split(x [Wg Wu]); h = Mul(act(g), u)

    Run before lower-block-matmul when weights are quantised, and before fuse-swiglu.

    Rules:
        1. `u` is a factor of a Mul whose other factor comes from `g` through an activation.
        2. Both are products of one kind with the same input and no bias, and nothing else reads their matrices.
        3. Both are equally wide.
    """

    name: ClassVar[str] = "merge-gate-up"

    def call(self, model: ir.Model) -> PassResult:
        """Merge every gated layer."""
        fired = 0
        skipped: list[Reason] = []
        for node in tuple(model.graph):
            pair = _gate_and_up(node)
            if pair is None:
                continue
            results = [product.outputs[0] for product in pair]
            why = why_not_mergeable(results) or _why_not_even(*pair)
            if why:
                skipped.append(Reason("2", str(node.name), why))
                continue
            name = str(pair[0].inputs[1].name if pair[0].inputs[1] else "").replace("gate_proj", "gate_up_proj")
            merge_products(results, name.removesuffix(".qweight").removesuffix(".weight"))
            fired += 1
        drop_unused_initializers(model.graph)
        return PassResult(fired, tuple(skipped))


def _gate_and_up(node: ir.Node) -> tuple[ir.Node, ir.Node] | None:
    """The two products behind ``Mul(act(g), u)``, in this order."""
    if not is_op(node, "Mul") or node.graph is None:
        return None
    for activated, plain in (node.inputs, tuple(reversed(node.inputs))):
        up, bias = product_below(plain)
        gate = _below_activation(activated)
        if up is None or gate is None or bias is not None or up is gate:
            continue
        if _is_product(up) and _is_product(gate) and up.inputs[0] is gate.inputs[0]:
            return gate, up
    return None


def _below_activation(value: ir.Value | None) -> ir.Node | None:
    step = producer(value)
    if step is None or step.op_type not in _ACTIVATIONS:
        return None
    while step is not None and step.op_type in _ACTIVATIONS:
        step = producer(step.inputs[0])
    return step


def _is_product(node: ir.Node) -> bool:
    return (node.op_type, node.domain) in {("MatMul", ""), ("FusedMatMul", MICROSOFT), ("BlockMatMul", DSPARK)}


def _why_not_even(gate: ir.Node, up: ir.Node) -> str:
    return "" if width(gate) == width(up) else "they are not equally wide"
