"""Several products of one input as one product: what merge-qkv and merge-gate-up share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from dsc.passes.graph_edit import (
    DSPARK,
    add_initializer,
    constant_array,
    insert,
    is_op,
    is_weight,
    owner,
    producer,
    remove_dead,
    replace_value,
    tensor_dims,
)
from dsc.passes.matmul_weights import find_matmul_weight


def product_below(value: ir.Value | None) -> tuple[ir.Node | None, ir.Value | None]:
    """The product that makes `value`, and the constant vector added to it when there is one."""
    step = producer(value)
    if step is None or not is_op(step, "Add"):
        return step, None
    for inner, bias in (step.inputs, tuple(reversed(step.inputs))):
        if bias is not None and is_weight(bias) and len(bias.shape or ()) == 1:
            return producer(inner), bias
    return step, None


def why_not_mergeable(values: Sequence[ir.Value]) -> str:
    """Why the products behind `values` cannot become one; empty when they can."""
    found = [product_below(value) for value in values]
    nodes, biases = [node for node, _ in found], [bias for _, bias in found]
    first = nodes[0]
    if any(node is None or first is None or _kind(node) != _kind(first) for node in nodes):
        return "they are not products of one kind"
    if _kind(first) is None:
        return "they are not products with constant matrices"
    if len({id(node.inputs[0]) for node in nodes if node is not None}) > 1:
        return "they multiply different inputs"
    if any((bias is None) != (biases[0] is None) for bias in biases):
        return "some of them have a bias and some have none"
    if any(bias is not None and node is not None and len(node.outputs[0].uses()) > 1 for node, bias in found):
        return "something reads a product before its bias is added"
    weights = [value for node in nodes if node is not None for value in node.inputs[1:] if value is not None]
    if len({id(value) for value in weights}) < len(weights) or any(len(value.uses()) > 1 for value in weights):
        return "a matrix is used elsewhere too, so merging would store it twice"
    return ""


def merge_products(values: Sequence[ir.Value], name: str) -> None:
    """Compute `values` as the parts of one product, biases included; the old products go.

    Args:
        values: results of products for which `why_not_mergeable` is empty, each with a bias or each without one,
            in the order in which the parts are to lie.
        name: prefix of the merged matrix's name.
    """
    found = [product_below(value) for value in values]
    nodes = [node for node, _ in found if node is not None]
    biases = [bias for _, bias in found if bias is not None]
    graph = owner(nodes[0])
    anchor = next(node for node in graph if node in nodes)
    packed = _one_product(nodes, anchor, name)
    if biases:
        arrays = [array for bias in biases if (array := constant_array(bias, max_elements=1 << 24)) is not None]
        bias = add_initializer(graph, f"{name}.bias", np.concatenate(arrays))
        packed = insert(anchor, "Add", [packed, bias], like=packed).outputs[0]
    sizes = add_initializer(graph, f"{name}.parts", np.array([width(node) for node in nodes]))
    split = insert(anchor, "Split", [packed, sizes], {"axis": -1}, num_outputs=len(values))
    old = [step for value in values if (step := value.producer()) is not None]
    for value, part in zip(values, split.outputs, strict=True):
        part.type, part.shape = value.type, value.shape
        replace_value(value, part)
    remove_dead(old)


def _one_product(nodes: Sequence[ir.Node], anchor: ir.Node, name: str) -> ir.Value:
    """The results of `nodes` side by side, computed before `anchor`; the old nodes stay, unused."""
    first = nodes[0]
    axis = 1 if is_op(first, "MatMul") else 0
    merged: list[ir.Value] = []
    for index in range(1, len(first.inputs)):
        values = [node.inputs[index] for node in nodes]
        suffix = str(values[0].name if values[0] else "").rpartition(".")[2]
        tensors = [value.const_value for value in values if value is not None and value.const_value is not None]
        merged.append(add_initializer(owner(first), f"{name}.{suffix}", concatenate(tensors, axis)))
    attributes = {key: attr.value for key, attr in first.attributes.items()}
    n = sum(map(width, nodes))
    if "N" in attributes:
        attributes["N"] = n
    product = insert(anchor, first.op_type, [first.inputs[0], *merged], attributes, domain=first.domain)
    output = product.outputs[0]
    output.type = first.outputs[0].type
    if first.outputs[0].shape is not None:
        output.shape = ir.Shape([*list(first.outputs[0].shape)[:-1], n])
    return output


def width(node: ir.Node) -> int:
    """How many columns the result of a product with a constant matrix has.

    Raises:
        ValueError: `node` is no such product.
    """
    if is_op(node, "BlockMatMul", DSPARK):
        return int(node.attributes["N"].value)
    found = find_matmul_weight(node)
    if found is None:
        raise ValueError(f"node {node.name!r} is not a product with a constant matrix")
    return found.n


def concatenate(tensors: Sequence[ir.TensorProtocol], axis: int) -> ir.TensorProtocol:
    """The tensors joined along `axis`, when they are read: no copy is kept."""
    dims = list(tensor_dims(tensors[0]))
    dims[axis] = sum(tensor_dims(tensor)[axis] for tensor in tensors)
    return ir.LazyTensor(_joiner(tuple(tensors), axis), dtype=tensors[0].dtype, shape=ir.Shape(dims))


def _joiner(tensors: tuple[ir.TensorProtocol, ...], axis: int) -> Callable[[], ir.TensorProtocol]:
    def joined() -> ir.TensorProtocol:
        array = np.concatenate([tensor.numpy() for tensor in tensors], axis)
        return ir.Tensor(array, dtype=tensors[0].dtype)

    return joined


def _kind(node: ir.Node | None) -> tuple[object, ...] | None:
    """What products must have in common to be merged; None for anything else than a product."""
    if node is None:
        return None
    if is_op(node, "BlockMatMul", DSPARK):
        return ("block", len(node.inputs), *(node.attributes[key].value for key in ("K", "bits", "block")))
    found = find_matmul_weight(node)
    if found is None or found.transpose is not None:
        return None
    return ("float", node.op_type, found.k, found.by_rows, found.value.dtype)
