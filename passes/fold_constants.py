"""Compute what is known at compile time, without a second copy of any weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass
from onnxscript.optimizer import fold_constants

from dsc.passes.base import GraphPass, PassResult, Reason
from dsc.passes.graph_edit import MICROSOFT, import_domain, remove_dead
from dsc.passes.matmul_weights import MatMulWeight, is_matrix_transpose, matmul_weights, store_transposed


@dataclass(frozen=True)
class FoldConstantsPass(GraphPass):
    """Fold small constant expressions and the transposes in front of weights.

    ::

        MatMul(x, Transpose(W[n, k]))  ->  MatMul(x, W'[k, n])              rule 2, W' computed when written
        MatMul(x, Transpose(E[n, k])), Gather(E, ids)
                                       ->  FusedMatMul(x, E, transB=1), ... rule 3, E stays the only copy
        Add(1, 2)                      ->  3                                rule 4

    Rules:
        1. A Constant node becomes an initializer.
        2. A weight that only transposes read is stored transposed. The transposition is lazy: it happens
           tensor by tensor while the graph is written, so memory never holds more than one of them.
        3. A transposed weight that something else reads too (a tied embedding) is never stored twice: the
           product takes it as it is. With pre-packed weights onnxruntime runs both spellings equally fast.
        4. A node whose inputs are constants of at most `max_elements` elements becomes an initializer.
    """

    name: ClassVar[str] = "fold-constants"

    max_elements: int = 8192

    def call(self, model: ir.Model) -> PassResult:
        """Apply the rules in order."""
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        fired, skipped = _fold_transposes(model)
        before = len(model.graph)
        fold_constants(
            model,
            onnx_shape_inference=False,
            input_size_limit=self.max_elements,
            output_size_limit=self.max_elements,
        )
        folded = before - len(model.graph)
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        return PassResult(fired + folded, tuple(skipped))


def _fold_transposes(model: ir.Model) -> tuple[int, list[Reason]]:
    fired = 0
    skipped: list[Reason] = []
    for weight in matmul_weights(model.graph):
        if weight.transpose is None:
            continue
        users = [node for node, _ in weight.value.uses()]
        if all(is_matrix_transpose(node) for node in users) and not weight.value.is_graph_output():
            _store_transposed(weight)
        else:
            _multiply_by_rows(model, weight)
            skipped.append(Reason("2", weight.name, "other nodes read the weight as it is; rule 3 used instead"))
        fired += 1
    return fired, skipped


def _store_transposed(weight: MatMulWeight) -> None:
    """Rule 2. All transposes of the weight go at once: it may feed several products."""
    transposes = [node for node, _ in weight.value.uses()]
    for node in transposes:
        node.outputs[0].replace_all_uses_with(weight.value, replace_graph_outputs=False)
    store_transposed(weight.value)
    remove_dead(transposes)


def _multiply_by_rows(model: ir.Model, weight: MatMulWeight) -> None:
    """Rule 3. The product is respelled in place, so names, types and shapes around it stay."""
    node = weight.node
    transpose = weight.transpose
    node.domain, node.op_type = MICROSOFT, "FusedMatMul"
    node.attributes["transB"] = ir.AttrInt64("transB", int(weight.by_rows))
    node.replace_input_with(1, weight.value)
    import_domain(model, MICROSOFT)
    if transpose is not None:
        remove_dead([transpose])
