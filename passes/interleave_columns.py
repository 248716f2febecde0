"""Quantised matrices in the layout that the native kernels read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import onnx_ir as ir

from dsc.kernels.block_matmul import BLOCK
from dsc.kernels.interleave import COLUMNS, interleave_codes, interleave_factors, tiles_of
from dsc.passes.base import GraphPass, PassResult, Reason
from dsc.passes.graph_edit import (
    DSPARK,
    MICROSOFT,
    add_initializer,
    attribute,
    drop_unused_initializers,
    input_at,
    insert,
    is_op,
    is_weight,
    producer,
    rearranged,
    remove_dead,
    replace_value,
    tensor_dims,
)
from dsc.passes.quantize_embedding import BY_BLOCK


@dataclass(frozen=True)
class InterleaveColumnsPass(GraphPass):
    """Store sixteen columns of a quantised matrix side by side.

    ::

        y = BlockMatMul(x, q[n, g, p], s[n, g])                ->  y = InterleavedMatMul(x, q'[t, g, p/4, 16, 4], s')
        e = Reshape(GatherBlockQuantized(q, ids, s[n, g, 1]))  ->  e = InterleavedGather(ids, q', s')

    A register then holds eight columns and needs no shuffling, so that a few rows cost hardly more than one.
    The content is put in order when it is read: no copy is kept.

    Run last of what all sets of kernels share; separate-columns undoes it for those that read rows.

    Rules:
        1. The matrix has blocks of 32 weights.
        2. Nothing else reads it than products and the gather of quantize-embedding from 64-bit ids.
    """

    name: ClassVar[str] = "interleave-columns"

    def call(self, model: ir.Model) -> PassResult:
        """Interleave every matrix that rules 1 and 2 allow."""
        products: dict[ir.Value, list[ir.Node]] = {}
        for node in model.graph:
            if is_op(node, "BlockMatMul", DSPARK) and node.inputs[1] is not None:
                products.setdefault(node.inputs[1], []).append(node)
        fired = 0
        skipped: list[Reason] = []
        for qweight, nodes in products.items():
            others = [user for user, _ in qweight.uses() if user not in nodes]
            ends = [end for end in (_end_of_gather(user, nodes[0]) for user in others) if end is not None]
            if any(attribute(node, "block", BLOCK) != BLOCK for node in nodes):
                skipped.append(Reason("1", str(qweight.name), "its blocks are not of 32 weights"))
            elif not is_weight(qweight) or len(ends) < len(others):
                skipped.append(Reason("2", str(qweight.name), "something else reads it"))
            else:
                _interleave(model.graph, nodes, list(zip(others, ends, strict=True)))
                fired += len(nodes) + len(others)
        drop_unused_initializers(model.graph)
        return PassResult(fired, tuple(skipped))


def _end_of_gather(gather: ir.Node, product: ir.Node) -> ir.Node | None:
    """The last node of what quantize-embedding wrote from `gather` on; None when this is something else."""
    scales, mins = product.inputs[2], input_at(product, 3)
    if not is_op(gather, "GatherBlockQuantized", MICROSOFT) or not _is_by_block(gather.inputs[2], scales):
        return None
    last = _only_user(gather)
    if mins is not None:
        shifts = None if last is None or not is_op(last, "Add") else producer(last.inputs[1])
        if last is None or shifts is None or not _is_by_block(shifts.inputs[0], mins):
            return None
        last = _only_user(last)
    ids = gather.inputs[1]
    return last if is_op(last, "Reshape") and ids is not None and ids.dtype == ir.DataType.INT64 else None


def _is_by_block(value: ir.Value | None, factors: ir.Value | None) -> bool:
    return value is not None and factors is not None and value.name == f"{factors.name}{BY_BLOCK}"


def _only_user(node: ir.Node) -> ir.Node | None:
    users = [user for user, _ in node.outputs[0].uses()]
    return users[0] if len(users) == 1 else None


def _interleave(graph: ir.Graph, products: Sequence[ir.Node], gathers: Sequence[tuple[ir.Node, ir.Node]]) -> None:
    """gathers: the first and the last node of each."""
    first = products[0]
    blocks = [None if value is None else _interleaved(graph, value) for value in first.inputs[1:]]
    for node in products:
        attributes = {name: attr.value for name, attr in node.attributes.items()}
        _put("InterleavedMatMul", node, [node.inputs[0], *blocks], attributes)
    described = {name: attribute(first, name, 0) for name in ("bits", "K", "N")} | {"block": BLOCK}
    for gather, last in gathers:
        _put("InterleavedGather", last, [gather.inputs[1], *blocks], described)


def _put(kind: str, node: ir.Node, inputs: Sequence[ir.Value | None], attributes: dict[str, Any]) -> None:
    """An operator in place of `node` and of what only fed it."""
    output = node.outputs[0]
    replace_value(output, insert(node, kind, inputs, attributes, domain=DSPARK, like=output).outputs[0])
    remove_dead([node])


def _interleaved(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """The initializer in the other layout, made once; the name says it."""
    name = f"{value.name}.by_{COLUMNS}"
    if name in graph.initializers:
        return graph.initializers[name]
    tensor = value.const_value
    if tensor is None:
        raise ValueError(f"{value.name!r} has no content")
    n, groups, *size = tensor_dims(tensor)
    shape = [tiles_of(n), groups, *([size[0] // 4, COLUMNS, 4] if size else [COLUMNS])]
    change = interleave_codes if size else interleave_factors
    return add_initializer(graph, name, rearranged(tensor, change, shape))
