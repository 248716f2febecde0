"""Half-precision conversion of a forward graph: what to-float16 and to-bfloat16 share."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from dsc.bundle_schema.errors import PassError
from dsc.passes.base import PassResult, Reason
from dsc.passes.graph_edit import insert, owner, replace_value, tensor_dims

FLOAT = ir.DataType.FLOAT

# Sums, exponentials and powers lose all their digits, or overflow, in 16 bits; angles need every position exactly.
_REDUCTION = "Reduce"
_NORMS = ("Normalization", "Softmax")
_POINTWISE = {"Pow", "Exp", "Log", "Sqrt", "Reciprocal", "Cos", "Sin", "CumSum", "TopK", "ArgMax"}
_SCALING = ("Mul", "Div")
# Operators with weights or pools: where 16-bit values enter.
_PRODUCTS = {"MatMul", "FusedMatMul", "Gemm", "BlockMatMul", "MatMulNBits", "Experts", "MoE", "QMoE"}
_HALF_SOURCES = _PRODUCTS | {"Gather", "GatherBlockQuantized", "GroupQueryAttention", "VerifyAttention"}
# Inputs that kernels read in float32 whatever their rows are: attention sinks.
_FLOAT32_INPUTS = {("VerifyAttention", 6)}


def convert_floats(model: ir.Model, dtype: ir.DataType) -> PassResult:
    """Hold weights, pools and activations in `dtype`; logits, taps, norms, reductions and angles in float32.

    The rules are those of the passes' docstrings. Weights are converted when they are read, one by one.
    """
    graph = model.graph
    if any(True for _ in graph.subgraphs() if _ is not graph):
        raise PassError("graph", "graphs with subgraphs (If, Loop, Scan) cannot be converted")
    converter = _Converter(graph, dtype)
    for value in graph.inputs:
        if value.dtype == FLOAT:
            value.type = ir.TensorType(dtype)
            converter.fired += 1
    for node in tuple(graph):
        converter.convert_node(node)
    for output in list(graph.outputs):
        converter.restore_output(output)
    return PassResult(converter.fired, tuple(converter.kept))


class _Converter:
    """The walk's state: which value already has a copy in the other type, in which type each was made."""

    def __init__(self, graph: ir.Graph, dtype: ir.DataType) -> None:
        self.graph = graph
        self.dtype = dtype
        self.fired = 0
        self.kept: list[Reason] = []
        self._casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
        self._sums: set[ir.Value] = set()  # what reductions gave, and what is computed from that alone

    def convert_node(self, node: ir.Node) -> None:
        """Give `node` inputs of one float type and its outputs that type."""
        if node.op_type == "Cast":
            return  # an explicit cast states its own result type
        floats = [v for v in node.inputs if v is not None and v.dtype in (FLOAT, self.dtype)]
        if not floats:
            return
        wanted = self._wanted(node, floats)
        if self._stays_float32(node) and any(v.dtype == self.dtype for v in floats):
            self.kept.append(Reason("2", str(node.name), f"{node.op_type} stays float32"))
        for index, value in enumerate(node.inputs):
            kind = FLOAT if (node.op_type, index) in _FLOAT32_INPUTS else wanted
            if value is not None and value.dtype in (FLOAT, self.dtype) and value.dtype != kind:
                node.replace_input_with(index, self._as(value, kind, node))
        for output in node.outputs:
            if output.dtype in (FLOAT, None) and output.name:
                output.type = ir.TensorType(wanted)
        computed = [v for v in node.inputs if v is not None and not v.is_initializer()]
        if node.op_type.startswith(_REDUCTION) or (computed and all(v in self._sums for v in computed)):
            self._sums.update(node.outputs)

    def _wanted(self, node: ir.Node, floats: list[ir.Value]) -> ir.DataType:
        if self._stays_float32(node):
            return FLOAT
        enters = node.op_type in _HALF_SOURCES
        return self.dtype if enters or any(value.dtype == self.dtype for value in floats) else FLOAT

    def _stays_float32(self, node: ir.Node) -> bool:
        """Sums, powers and norms, also those written out: a square, and what a sum scales."""
        kind = node.op_type
        if kind.startswith(_REDUCTION) or kind.endswith(_NORMS) or kind in _POINTWISE:
            return True
        square = kind == "Mul" and node.inputs[0] is node.inputs[1]
        return square or (kind in _SCALING and any(value in self._sums for value in node.inputs))

    def _as(self, value: ir.Value, dtype: ir.DataType, user: ir.Node) -> ir.Value:
        """`value` in `dtype`: a converted initializer, the value before its cast, or one new cast for all users."""
        key = (value, dtype)
        if key not in self._casts:
            self._casts[key] = self._convert(value, dtype, user)
        return self._casts[key]

    def _convert(self, value: ir.Value, dtype: ir.DataType, user: ir.Node) -> ir.Value:
        if value.is_initializer() and value.const_value is not None:
            return self._converted_initializer(value, value.const_value, dtype)
        cast = insert(user, "Cast", [value], {"to": dtype.value}, dtype=dtype, shape=value.shape)
        self._casts[cast.outputs[0], value.dtype or FLOAT] = value
        self.fired += 1
        return cast.outputs[0]

    def _converted_initializer(self, value: ir.Value, tensor: ir.TensorProtocol, dtype: ir.DataType) -> ir.Value:
        """The initializer itself when nobody needs it in float32, else a second, converted one."""
        converted = ir.LazyTensor(
            _caster(tensor, dtype), dtype=dtype, shape=ir.Shape(tensor_dims(tensor)), name=value.name
        )
        self.fired += 1
        if all(self._takes(node, index, dtype) for node, index in value.uses()):
            value.const_value = converted
            value.type = ir.TensorType(dtype)
            return value
        twin = ir.Value(name=f"{value.name}.{dtype.name.lower()}", shape=converted.shape, type=ir.TensorType(dtype))
        twin.const_value = converted
        self.graph.register_initializer(twin)
        return twin

    def _takes(self, node: ir.Node, index: int, dtype: ir.DataType) -> bool:
        if (node.op_type, index) in _FLOAT32_INPUTS:
            return dtype == FLOAT
        floats = [v for v in node.inputs if v is not None and v.dtype in (FLOAT, self.dtype)]
        return node.op_type != "Cast" and self._wanted(node, floats) == dtype

    def restore_output(self, output: ir.Value) -> None:
        """Logits and taps leave the graph in float32; a pool leaves as it came."""
        if output.dtype != self.dtype or (output.name or "").startswith(("k_pool_out.", "v_pool_out.")):
            return
        node = output.producer()
        if node is None:
            return
        last = list(owner(node))[-1]
        cast = ir.node("Cast", [output], {"to": FLOAT.value})
        owner(node).insert_after(last, cast)
        users = [(user, index) for user, index in output.uses() if user is not cast]
        replace_value(output, cast.outputs[0])
        cast.replace_input_with(0, output)
        for user, index in users:
            user.replace_input_with(index, output)
        cast.outputs[0].type = ir.TensorType(FLOAT)
        self.fired += 1


def _caster(tensor: ir.TensorProtocol, dtype: ir.DataType) -> Callable[[], ir.TensorProtocol]:
    def cast() -> ir.TensorProtocol:
        return ir.Tensor(tensor.numpy().astype(dtype.numpy()), dtype=dtype, name=tensor.name)

    return cast
