"""A product, the residual addition that takes it and the normalisation after that in one native operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from dsc.passes.base import GraphPass, PassResult, Reason
from dsc.passes.graph_edit import (
    DSPARK,
    MICROSOFT,
    attribute,
    import_domain,
    input_at,
    insert,
    is_op,
    producer,
    remove_dead,
    replace_value,
)

_PRODUCTS = {"DenseMatMul": 2, "Int16MatMul": 3, "InterleavedMatMul": 4}
"""Operator -> its inputs, the absent ones counted."""


@dataclass(frozen=True)
class FuseMatMulSkipNormPass(GraphPass):
    """Let a native product add the residual and normalise the sum.

    ::

        p = DenseMatMul(x, W); n, s = SkipSimplifiedLayerNormalization(a, p, g)
        ->
        n, s = DenseMatMulSkipNorm(x, W, a, g)

    The same for Int16MatMul and InterleavedMatMul. Between two products nothing is then started that one thread does
    alone while memory waits.

    Run after fuse-skip-norm, interleave-columns and fuse-dense-matmul.

    Rules:
        1. A native product is one of the two terms, and nothing else reads it.
        2. The normalisation has no bias, gives no more than the normalised sum and the sum, and its terms are of one
           shape.
    """

    name: ClassVar[str] = "fuse-matmul-skip-norm"

    def call(self, model: ir.Model) -> PassResult:
        """Fuse every such normalisation of the main graph."""
        fired = 0
        skipped: list[Reason] = []
        for norm in tuple(model.graph):
            if not is_op(norm, "SkipSimplifiedLayerNormalization", MICROSOFT):
                continue
            product = next(filter(_is_lone_product, map(producer, norm.inputs[:2])), None)
            if product is None:
                skipped.append(Reason("1", str(norm.name), "no term is a native product that nothing else reads"))
            elif why := _why_not(norm):
                skipped.append(Reason("2", str(norm.name), why))
            else:
                _fuse(product, norm)
                fired += 1
        if fired:
            import_domain(model, DSPARK)
        return PassResult(fired, tuple(skipped))


def _is_lone_product(node: ir.Node | None) -> bool:
    if node is None or node.domain != DSPARK or node.op_type not in _PRODUCTS:
        return False
    return len(node.outputs[0].uses()) == 1 and not node.outputs[0].is_graph_output()


def _why_not(norm: ir.Node) -> str:
    if input_at(norm, 3) is not None:
        return "it has a bias"
    if any(out.uses() or out.is_graph_output() for out in norm.outputs[1:3]):
        return "it gives more than its result and the sum"
    shapes = [term.shape for term in norm.inputs[:2] if term is not None]
    return "" if shapes[0] == shapes[1] else f"the terms have the shapes {shapes[0]} and {shapes[1]}"


def _fuse(product: ir.Node, norm: ir.Node) -> None:
    skip = norm.inputs[1] if norm.inputs[0] is product.outputs[0] else norm.inputs[0]
    inputs = [input_at(product, index) for index in range(_PRODUCTS[product.op_type])]
    attributes = {name: attr.value for name, attr in product.attributes.items()}
    fused = insert(
        norm,
        f"{product.op_type}SkipNorm",
        [*inputs, skip, norm.inputs[2]],
        attributes | {"epsilon": attribute(norm, "epsilon", 1e-5)},
        domain=DSPARK,
        like=skip,
        num_outputs=2,
    )
    fused.outputs[1].type, fused.outputs[1].shape = fused.outputs[0].type, fused.outputs[0].shape
    replace_value(norm.outputs[0], fused.outputs[0])
    if len(norm.outputs) > 3:
        replace_value(norm.outputs[3], fused.outputs[1])
    remove_dead([norm])
