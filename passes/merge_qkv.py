"""One product for the queries, keys and values of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from dsc.passes.attention_inputs import heads_input, side_by_side
from dsc.passes.base import GraphPass, PassResult, Reason
from dsc.passes.graph_edit import DSPARK, drop_unused_initializers, is_op
from dsc.passes.merge_products import merge_products, product_below, why_not_mergeable


@dataclass(frozen=True)
class MergeQkvPass(GraphPass):
    """Compute queries, keys and values in one product, so that attention can read them side by side.

    ::

        q2 = x Wq; k2 = x Wk; v2 = x Wv  ->  q2, k2, v2 = Split(x [Wq Wk Wv])

    Run before lower-attention and fuse-qkv-attention, which take the product's result whole where nothing but
    what they compute themselves stands between.

    Rules:
        1. Between the products and VerifyAttention are only the splitting into heads and a rotary embedding: with
           more, nobody could take the result whole, and cutting it costs what one product gains.
        2. All three are products of one kind with the same input, with a bias each or none.
        3. No matrix is read by anything else.
    """

    name: ClassVar[str] = "merge-qkv"

    def call(self, model: ir.Model) -> PassResult:
        """Merge layer by layer."""
        fired = 0
        skipped: list[Reason] = []
        for node in tuple(model.graph):
            if not is_op(node, "VerifyAttention", DSPARK):
                continue
            why = _merge(node)
            fired += not why
            skipped += [Reason("1-3", str(node.name), why)] if why else []
        drop_unused_initializers(model.graph)
        return PassResult(fired, tuple(skipped))


def _merge(node: ir.Node) -> str:
    """Merge the products of one attention node, or say why not."""
    values: list[ir.Value] = []
    for value in node.inputs[:3]:
        found = heads_input(value)
        if isinstance(found, str):
            return found
        values.append(found.flat)
    if side_by_side(values) is not None:
        return "they are the parts of one value already"
    why = why_not_mergeable(values)
    if why:
        return why
    first, _ = product_below(values[0])
    name = str(first.inputs[1].name if first is not None and first.inputs[1] else "").replace("q_proj", "qkv_proj")
    merge_products(values, name.removesuffix(".qweight").removesuffix(".weight"))
    return ""
