"""The constant matrix that a product with activations uses, whichever way the graph spells it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from dsc.passes.graph_edit import MICROSOFT, attribute, input_at, is_op, is_weight, producer, tensor_dims


@dataclass(frozen=True)
class MatMulWeight:
    """A product ``y = x W^T`` with a constant W.

    Attributes:
        node: the MatMul, FusedMatMul or Gemm-free product.
        value: the initializer.
        n, k: rows (outputs) and columns (inputs) of W.
        by_rows: whether the initializer holds W as [n, k] (the checkpoint's layout), else [k, n].
        transpose: the Transpose node between the initializer and the product, when there is one.
    """

    node: ir.Node
    value: ir.Value
    n: int
    k: int
    by_rows: bool
    transpose: ir.Node | None = None

    @property
    def name(self) -> str:
        """The initializer's name, which is the checkpoint's parameter name."""
        return str(self.value.name)

    def rows(self) -> npt.NDArray[Any]:
        """W as [n, k]; a view where the initializer's layout allows it."""
        array = content(self.value).numpy()
        return array if self.by_rows else array.T


def find_matmul_weight(node: ir.Node) -> MatMulWeight | None:
    """How `node` multiplies activations by a constant matrix, None when it does not."""
    if is_op(node, "MatMul"):
        transposed = False
    elif (
        is_op(node, "FusedMatMul", MICROSOFT)
        and not attribute(node, "transA", 0)
        and attribute(node, "alpha", 1.0) == 1
    ):
        transposed = bool(attribute(node, "transB", 0))
    else:
        return None
    value = input_at(node, 1)
    step = producer(value)
    transpose = step if step is not None and is_matrix_transpose(step) else None
    if transpose is not None:
        value, transposed = transpose.inputs[0], not transposed
    if value is None or not is_weight(value) or value.const_value is None or len(value.const_value.shape) != 2:
        return None
    rows, columns = tensor_dims(value.const_value)
    n, k = (rows, columns) if transposed else (columns, rows)
    return MatMulWeight(node, value, n, k, transposed, transpose)


def matmul_weights(graph: ir.Graph) -> Iterator[MatMulWeight]:
    """Every product with a constant matrix, in graph order."""
    for node in tuple(graph):
        found = find_matmul_weight(node)
        if found is not None:
            yield found


class TransposedTensor(ir.LazyTensor):
    """A matrix transposed when it is read, so that memory never holds more than one of them.

    Attributes:
        source: the matrix as it is.
    """

    def __init__(self, source: ir.TensorProtocol) -> None:
        def transposed() -> ir.TensorProtocol:
            return ir.Tensor(np.ascontiguousarray(source.numpy().T), dtype=source.dtype, name=source.name)

        shape = ir.Shape(reversed(tensor_dims(source)))
        super().__init__(transposed, dtype=source.dtype, shape=shape, name=source.name)
        self.source = source


def content(value: ir.Value) -> ir.TensorProtocol:
    """The tensor of an initializer."""
    if value.const_value is None:
        raise ValueError(f"initializer {value.name!r} lost its content")
    return value.const_value


def store_transposed(value: ir.Value) -> None:
    """Turn the matrix of an initializer over; twice is what it was. Its users are the caller's to change."""
    tensor = content(value)
    value.const_value = tensor.source if isinstance(tensor, TransposedTensor) else TransposedTensor(tensor)
    value.shape = ir.Shape(tensor_dims(value.const_value))


def is_matrix_transpose(node: ir.Node) -> bool:
    """Whether `node` swaps the two axes of a matrix."""
    if not is_op(node, "Transpose"):
        return False
    perm = node.attributes.get("perm")
    return perm is not None and tuple(perm.value) == (1, 0)


def row_matrices(graph: ir.Graph) -> Iterator[tuple[ir.Value, list[ir.Node]]]:
    """Every constant matrix that a product or a gather reads, with its readers: products by its rows [n, k], gathers
    of rows by 64-bit ids. No readers where something takes it in another way.
    """
    seen: set[ir.Value] = set()
    for node in tuple(graph):
        matrix = _matrix_of(node)
        if matrix is None or matrix in seen:
            continue
        seen.add(matrix)
        uses = list(matrix.uses())
        by_rows = all(_reads_rows(user, index, matrix) for user, index in uses) and not matrix.is_graph_output()
        yield matrix, [user for user, _ in uses] if by_rows else []


def _matrix_of(node: ir.Node) -> ir.Value | None:
    found = find_matmul_weight(node)
    if found is not None:
        return found.value
    table = input_at(node, 0) if is_op(node, "Gather") else None
    if table is None or not is_weight(table) or table.const_value is None:
        return None
    return table if len(table.const_value.shape) == 2 else None


def _reads_rows(node: ir.Node, index: int, matrix: ir.Value) -> bool:
    if is_op(node, "Gather"):
        ids = node.inputs[1]
        return index == 0 and not attribute(node, "axis", 0) and ids is not None and ids.dtype == ir.DataType.INT64
    found = find_matmul_weight(node)
    return found is not None and index == 1 and found.value is matrix and found.by_rows and found.transpose is None
