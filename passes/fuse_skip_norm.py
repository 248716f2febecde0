"""A residual addition and the normalisation of its result in one operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from dsc.passes.base import GraphPass, PassResult, Reason
from dsc.passes.graph_edit import (
    MICROSOFT,
    attribute,
    import_domain,
    insert,
    is_op,
    is_weight,
    producer,
    remove_dead,
    replace_value,
)


@dataclass(frozen=True)
class FuseSkipNormPass(GraphPass):
    """Fuse Add and RMSNormalization into com.microsoft::SkipSimplifiedLayerNormalization.

    ::

        s = Add(a, b); n = RMSNormalization(s, g)  ->  n, s = SkipSimplifiedLayerNormalization(a, b, g)

    Rules:
        1. The normalisation is over the last axis, its sum of squares in float32, its weight constant.
        2. `a` and `b` have the same shape [B, S, H]; broadcasting additions stay.
    """

    name: ClassVar[str] = "fuse-skip-norm"

    def call(self, model: ir.Model) -> PassResult:
        """Fuse wherever a normalisation reads an addition."""
        fired = 0
        skipped: list[Reason] = []
        for node in tuple(model.graph):
            if not is_op(node, "RMSNormalization"):
                continue
            why = _why_not(node)
            if why:
                skipped.append(Reason("1-2", str(node.name), why))
                continue
            _fuse(node)
            fired += 1
        if fired:
            import_domain(model, MICROSOFT)
        return PassResult(fired, tuple(skipped))


def _why_not(node: ir.Node) -> str:
    add, value = producer(node.inputs[0]), node.inputs[0]
    if value is None or add is None or not is_op(add, "Add"):
        return "what it normalises is not a sum"
    rank = len(value.shape) if value.shape is not None else 0
    if rank != 3 or attribute(node, "axis", -1) not in (-1, 2) or attribute(node, "stash_type", 1) != 1:
        return "required the last of three axes, normalised in float32"
    if not is_weight(node.inputs[1]):
        return "its weight is not constant"
    shapes = [term.shape for term in add.inputs if term is not None]
    if None in shapes or shapes[0] != shapes[1] or shapes[0] != value.shape:
        return f"the terms have the shapes {shapes}"
    if any(is_weight(term) for term in add.inputs):
        return "a term is constant"
    return ""


def _fuse(node: ir.Node) -> None:
    add = producer(node.inputs[0])
    if add is None:
        raise ValueError(f"node {node.name!r} lost its sum")
    fused = insert(
        add,
        "SkipSimplifiedLayerNormalization",
        [*add.inputs, node.inputs[1]],
        {"epsilon": attribute(node, "epsilon", 1e-5)},
        domain=MICROSOFT,
        num_outputs=4,
    )
    for unused in fused.outputs[1:3]:
        unused.name = ""
    replace_value(node.outputs[0], fused.outputs[0])
    replace_value(add.outputs[0], fused.outputs[3])
    remove_dead([add, node])
