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


def why_not_mergeable(nodes: Sequence[ir.Node | None]) -> str:
    """Why `nodes` cannot become one product; empty when they can."""
    first = nodes[0]
    if any(node is None or first is None or _kind(node) != _kind(first) for node in nodes):
        return "they are not products of one kind"
    if _kind(first) is None:
        return "they are not products with constant matrices"
    if len({id(node.inputs[0]) for node in nodes if node is not None}) > 1:
        return "they multiply different inputs"
    weights = [value for node in nodes if node is not None for value in node.inputs[1:] if value is not None]
    if len({id(value) for value in weights}) < len(weights) or any(len(value.uses()) > 1 for value in weights):
        return "a matrix is used elsewhere too, so merging would store it twice"
    return ""


def merge_products(nodes: Sequence[ir.Node], name: str) -> ir.Value:
    """One product whose result is the results of `nodes` side by side; the old nodes stay, unused.

    Args:
        nodes: products for which `why_not_mergeable` is empty, first to last.
        name: prefix of the merged matrix's name.
    """
    first = nodes[0]
    axis = 1 if is_op(first, "MatMul") else 0
    merged: list[ir.Value] = []
    for index in range(1, len(first.inputs)):
        values = [node.inputs[index] for node in nodes]
        suffix = str(values[0].name if values[0] else "").rpartition(".")[2]
        tensors = [value.const_value for value in values if value is not None and value.const_value is not None]
        merged.append(add_initializer(owner(first), f"{name}.{suffix}", concatenate(tensors, axis)))
    attributes = {key: attr.value for key, attr in first.attributes.items()}
    if "N" in attributes:
        attributes["N"] = sum(int(node.attributes["N"].value) for node in nodes)
    anchor = next(node for node in owner(first) if node in nodes)
    product = insert(anchor, first.op_type, [first.inputs[0], *merged], attributes, domain=first.domain)
    output = product.outputs[0]
    output.type = first.outputs[0].type
    widths = [node.outputs[0].shape[-1] if node.outputs[0].shape is not None else None for node in nodes]
    if first.outputs[0].shape is not None and all(isinstance(width, int) for width in widths):
        output.shape = ir.Shape([*list(first.outputs[0].shape)[:-1], sum(w for w in widths if isinstance(w, int))])
    return output


def merge_biases(anchor: ir.Node, product: ir.Value, biases: Sequence[ir.Value | None], name: str) -> ir.Value:
    """Add the constant vectors side by side; `product` itself when there are none.

    Raises:
        ValueError: some products have a bias and some have none.
    """
    arrays = [constant_array(bias, max_elements=1 << 24) for bias in biases]
    if all(array is None for array in arrays):
        return product
    present = [array for array in arrays if array is not None]
    if len(present) < len(arrays):
        raise ValueError("some products have a bias and some have none")
    bias = add_initializer(owner(anchor), f"{name}.bias", np.concatenate(present))
    return insert(anchor, "Add", [product, bias], like=product).outputs[0]


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
