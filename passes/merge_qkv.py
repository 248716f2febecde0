"""One product for the queries, keys and values of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from dsc.passes.base import GraphPass, PassResult, Reason
from dsc.passes.graph_edit import MICROSOFT, drop_unused_initializers, is_op, producer, remove_dead
from dsc.passes.merge_products import merge_biases, merge_products, product_below, why_not_mergeable


@dataclass(frozen=True)
class MergeQkvPass(GraphPass):
    """Let GroupQueryAttention read q, k and v side by side from one product.

    ::

        y = GroupQueryAttention(x Wq, x Wk, x Wv, ...)  ->  y = GroupQueryAttention(x [Wq Wk Wv], "", "", ...)

    Run after lower-attention, and before lower-block-matmul when weights are quantised.

    Rules:
        1. All three are products of one kind with the same input, with a bias each or none.
        2. Nothing stands between product and attention, so the rotary embedding must be inside the operator.
        3. No matrix is read by anything else.
    """

    name: ClassVar[str] = "merge-qkv"

    def call(self, model: ir.Model) -> PassResult:
        """Merge layer by layer."""
        fired = 0
        skipped: list[Reason] = []
        for node in tuple(model.graph):
            if not is_op(node, "GroupQueryAttention", MICROSOFT) or node.inputs[1] is None:
                continue
            why = _merge(node)
            fired += not why
            skipped += [Reason("1-3", str(node.name), why)] if why else []
        drop_unused_initializers(model.graph)
        return PassResult(fired, tuple(skipped))


def _merge(node: ir.Node) -> str:
    """Merge the products of one attention node, or say why not."""
    if any(is_op(producer(value), "RotaryEmbedding") for value in node.inputs[:2]):
        return "a RotaryEmbedding stands between product and attention"
    found = [product_below(value) for value in node.inputs[:3]]
    products = [product for product, _ in found]
    biases = [bias for _, bias in found]
    why = why_not_mergeable(products)
    if why or any((bias is None) != (biases[0] is None) for bias in biases):
        return why or "some of them have a bias and some have none"
    if any(value is not None and len(value.uses()) > 1 for value in node.inputs[:3]):
        return "a projection is read by something else too"
    nodes = [product for product in products if product is not None]
    name = str(nodes[0].inputs[1].name if nodes[0].inputs[1] else "").replace("q_proj", "qkv_proj")
    name = name.removesuffix(".qweight").removesuffix(".weight")
    packed = merge_biases(node, merge_products(nodes, name), biases, name)
    old = [producer(value) for value in node.inputs[:3]]
    for index, value in enumerate((packed, None, None)):
        node.replace_input_with(index, value)
    remove_dead([step for step in old if step is not None])
    return ""
