"""The gated activation of a merged gate and up projection: one node for the native kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir

from dsc.passes.base import GraphPass, PassResult, Reason
from dsc.passes.graph_edit import (
    DSPARK,
    attribute,
    import_domain,
    insert,
    is_op,
    producer,
    remove_dead,
    replace_value,
    static_dims,
)


@dataclass(frozen=True)
class FuseSwigluPass(GraphPass):
    """Compute ``silu(gate) * up`` from the product that holds both halves.

    ::

        g, u = Split(x, axis=-1); y = Mul(Mul(g, Sigmoid(g)), u)  ->  y = SwiGlu(x)

    Run after merge-gate-up, which makes the product of both.

    Rules:
        1. A Mul joins the second half with an activation of the first half of one value, float32, equally wide.
        2. The activation is ``g * sigmoid(g)``, spelled so or as Swish with alpha 1.
    """

    name: ClassVar[str] = "fuse-swiglu"

    def call(self, model: ir.Model) -> PassResult:
        """Fuse every gated layer."""
        fired = 0
        skipped: list[Reason] = []
        for node in tuple(model.graph):
            found = _halves(node)
            if found is None:
                continue
            split, activated = found
            why = _why_not(split, activated)
            if why:
                skipped.append(Reason("1-2", str(node.name), why))
                continue
            output = node.outputs[0]
            replace_value(output, insert(node, "SwiGlu", [split.inputs[0]], domain=DSPARK, like=output).outputs[0])
            remove_dead([node])
            fired += 1
        if fired:
            import_domain(model, DSPARK)
        return PassResult(fired, tuple(skipped))


def _halves(node: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """The Split whose second half `node` multiplies by another value, and that value."""
    if not is_op(node, "Mul") or node.graph is None:
        return None
    for other, plain in (node.inputs, tuple(reversed(node.inputs))):
        split = producer(plain)
        if split is not None and is_op(split, "Split") and len(split.outputs) == 2 and plain is split.outputs[1]:
            return (split, other) if other is not None and other is not split.outputs[0] else None
    return None


def _why_not(split: ir.Node, activated: ir.Value) -> str:
    gate, up = (static_dims(half) for half in split.outputs)
    source = split.inputs[0]
    if gate is None or up is None or not gate or gate[-1] is None or gate[-1] != up[-1]:
        return "the two halves are not known to be equally wide"
    if attribute(split, "axis", 0) not in (-1, len(gate) - 1):
        return "the halves are not cut along the last axis"
    if source is None or source.dtype not in (None, ir.DataType.FLOAT):
        return "required float32"
    return "" if _is_silu(activated, split.outputs[0]) else "the activation of the first half is not x sigmoid(x)"


def _is_silu(value: ir.Value, gate: ir.Value) -> bool:
    step = producer(value)
    if step is None:
        return False
    if is_op(step, "Swish"):
        return step.inputs[0] is gate and attribute(step, "alpha", 1.0) == 1.0
    if not is_op(step, "Mul"):
        return False
    return any(
        one is gate and is_op(producer(other), "Sigmoid") and producer(other).inputs[0] is gate  # type: ignore[union-attr]
        for one, other in (step.inputs, tuple(reversed(step.inputs)))
    )
