"""Matrices as 4- or 8-bit blocks, or the blocks that the checkpoint already had."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import onnx_ir as ir

from dsc.bundle_schema.errors import PassError, RequestError
from dsc.passes.base import PROGRAM_ONLY, GraphPass, PassResult, Reason
from dsc.passes.block_quantisation import Blocks, BlockWeights, quantise_symmetric
from dsc.passes.graph_edit import DSPARK, add_initializer, import_domain, insert, producer, remove_dead, replace_value
from dsc.passes.matmul_weights import MatMulWeight, find_matmul_weight, matmul_weights

DEPENDS_ON_OTHERS = "scales activations over the whole tensor, so a row's result depends on the others"
_PASSED_THROUGH = ("Cast", "Mul", "Div", "Tanh", "Add", "Identity")


@dataclass(frozen=True)
class QuantizeWeightsPass(GraphPass):
    """Replace products with constant float matrices by products with blocks of integers.

    ::

        MatMul(x, W[k, n])  ->  BlockMatMul(x, W.qweight, W.scales)            rounded here
        MatMul(x, W[k, n])  ->  BlockMatMul(x, W.qweight, W.scales, W.mins)    the checkpoint's own blocks

    Rules:
        1. A matrix in `block_weights` takes those blocks as they are, whatever `bits` says: a second rounding of
           rounded numbers is what hurts.
        2. Any other matrix is rounded to the nearest integers, symmetric, a scale for `block` values along k.
        3. The matrix that makes the logits gets at least `head_bits` (rule 2 only).
        4. A name that matches a pattern in `exclude` (regular expression, searched), a matrix with fewer than
           `min_elements`, a k that is not a multiple of `block`, and with `exclude_head` the matrix of rule 3 keep
           their floats, and the report says so.
        5. Biases, norms and everything that is not a product with a matrix stay float32.

    Activations are quantised per row and block inside the operator (accuracy level 4), never over a whole tensor:
    that would make a row's logits depend on its neighbours. So dynamic quantisation nodes in the graph are refused.
    """

    name: ClassVar[str] = "quantize-weights"

    bits: Literal[4, 8] = 4
    block: Literal[32, 64, 128] = 32
    accuracy_level: Literal[0, 4] = 4
    head_bits: Literal[4, 8] = 8
    exclude_head: bool = False
    exclude: tuple[str, ...] = ()
    min_elements: int = 1024
    block_weights: Mapping[str, BlockWeights] = field(default_factory=dict, metadata=PROGRAM_ONLY)

    def __post_init__(self) -> None:
        if self.accuracy_level == 0 and 8 in (self.bits, self.head_bits):
            raise RequestError(
                f"pass {self.name}",
                "8-bit weights need accuracy_level 4, got 0: onnxruntime runs that 15 times slower",
                "leave accuracy_level at 4",
            )
        for pattern in self.exclude:
            try:
                re.compile(pattern)
            except re.error as error:
                what = f"a regular expression is required, got {pattern!r}: {error}"
                raise RequestError(f"pass {self.name}, option exclude", what) from None

    def requires(self, model: ir.Model) -> None:
        """No product in the graph quantises its activations over a whole tensor."""
        node = scaled_over_the_tensor(model)
        if node is not None:
            hint = "export the float model and let quantize-weights quantise it"
            raise PassError(f"node {node.name!r}", f"{node.op_type} {DEPENDS_ON_OTHERS}", hint)

    def call(self, model: ir.Model) -> PassResult:
        """Replace what the rules allow; two products with one matrix share its blocks."""
        fired = 0
        skipped: list[Reason] = []
        made: dict[str, list[ir.Value | None]] = {}
        head = head_weight(model.graph)
        for weight in matmul_weights(model.graph):
            why = self._why_not(weight, head)
            if why:
                skipped.append(Reason("4", weight.name, why))
                continue
            if weight.name not in made:
                bits = max(self.bits, self.head_bits) if weight.name == head else self.bits
                made[weight.name] = _add_blocks(model.graph, weight.name, self._blocks(weight, bits))
            _replace(weight, made[weight.name], self._attributes(weight, made[weight.name]))
            fired += 1
        if fired:
            import_domain(model, DSPARK)
        return PassResult(fired, tuple(skipped))

    def ensures(self, model: ir.Model) -> None:
        """Every matrix that the rules call for was really replaced."""
        head = head_weight(model.graph)
        for weight in matmul_weights(model.graph):
            if not self._why_not(weight, head):
                raise PassError(f"initializer {weight.name!r}", "should have been quantised and was not")
        replaced = {str(node.inputs[1].name) for node in _block_nodes(model.graph) if node.inputs[1]}
        for name in self.block_weights:
            # A matrix that is only an embedding is left to quantize-embedding.
            kept = name in model.graph.initializers or self._excluded(name)
            if f"{name}.qweight" not in replaced and not kept:
                raise PassError(
                    f"initializer {name!r}",
                    "its blocks were to be carried over, but no product in the graph uses a matrix of this name",
                    "quantize before passes that merge or rename weights",
                )

    def _why_not(self, weight: MatMulWeight, head: str | None) -> str:
        """Why rule 4 keeps the floats; empty when it does not."""
        if self.exclude_head and weight.name == head:
            return "excluded as the head"
        if self._excluded(weight.name):
            return "excluded by name"
        if weight.name in self.block_weights:
            return ""
        if weight.n * weight.k < self.min_elements:
            return f"{weight.n * weight.k} elements, fewer than {self.min_elements}"
        if weight.k % self.block:
            return f"k = {weight.k} is not a multiple of the block of {self.block}"
        if weight.value.dtype not in (None, ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
            return f"its element type is {weight.value.dtype}"
        return ""

    def _excluded(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.exclude)

    def _blocks(self, weight: MatMulWeight, bits: int) -> Blocks:
        carried = self.block_weights.get(weight.name)
        if carried is None:
            return quantise_symmetric(weight.rows(), bits, self.block)
        if carried.qweight.shape[:2] != (weight.n, weight.k // 32):
            raise PassError(
                f"initializer {weight.name!r}",
                f"required blocks for [{weight.n}, {weight.k}], got {carried.qweight.shape}",
            )
        return Blocks(carried.bits, carried.qweight, carried.scales, carried.mins)

    def _attributes(self, weight: MatMulWeight, values: list[ir.Value | None]) -> dict[str, int]:
        qweight = values[0]
        if qweight is None or qweight.const_value is None:
            raise PassError(f"initializer {weight.name!r}", "has no blocks")
        bytes_per_block = int(str(qweight.const_value.shape[2]))
        block = 32 if weight.name in self.block_weights else self.block
        attributes = {"K": weight.k, "N": weight.n, "bits": bytes_per_block * 8 // block, "block": block}
        return attributes | ({"accuracy_level": 0} if self.accuracy_level == 0 else {})


def head_weight(graph: ir.Graph) -> str | None:
    """Name of the matrix that makes the output `logits`, looking through scaling, softcap and casts."""
    value = next((output for output in graph.outputs if output.name == "logits"), None)
    step = producer(value)
    while step is not None:
        found = find_matmul_weight(step)
        if found is not None:
            return found.name
        step = producer(step.inputs[0]) if step.op_type in _PASSED_THROUGH else None
    return None


def scaled_over_the_tensor(model: ir.Model) -> ir.Node | None:
    """The first node that quantises activations with one scale for a whole tensor: a verified token's logits would
    depend on rejected ones.
    """
    names = ("DynamicQuantize", "MatMulInteger", "ConvInteger")
    return next((node for node in model.graph.all_nodes() if node.op_type.startswith(names)), None)


def _add_blocks(graph: ir.Graph, name: str, blocks: Blocks) -> list[ir.Value | None]:
    values: list[ir.Value | None] = [
        add_initializer(graph, f"{name}.qweight", np.ascontiguousarray(blocks.qweight)),
        add_initializer(graph, f"{name}.scales", np.ascontiguousarray(blocks.scales, np.float32)),
    ]
    if blocks.mins is not None:
        values.append(add_initializer(graph, f"{name}.mins", np.ascontiguousarray(blocks.mins, np.float32)))
    return values


def _replace(weight: MatMulWeight, blocks: list[ir.Value | None], attributes: dict[str, int]) -> None:
    node, output = weight.node, weight.node.outputs[0]
    product = insert(node, "BlockMatMul", [node.inputs[0], *blocks], attributes, domain=DSPARK)
    replace_value(output, product.outputs[0])
    graph = node.graph
    remove_dead([node])
    if isinstance(graph, ir.Graph) and not weight.value.uses() and not weight.value.is_graph_output():
        graph.initializers.pop(weight.name)


def _block_nodes(graph: ir.Graph) -> Iterator[ir.Node]:
    return (node for node in graph if node.op_type == "BlockMatMul" and node.domain == DSPARK)
