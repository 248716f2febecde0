"""ai.dspark::Experts as onnxruntime's MoE, which computes only the experts that were chosen."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from dsc.bundle_schema.errors import PassError
from dsc.passes.base import GraphPass, PassResult, Reason
from dsc.passes.graph_edit import (
    DSPARK,
    MICROSOFT,
    add_initializer,
    attribute,
    drop_unused_initializers,
    import_domain,
    input_at,
    insert,
    is_op,
    is_weight,
    owner,
    producer,
    rearranged,
    remove_dead,
    replace_value,
    tensor_dims,
)

_ABSENT = np.float32(-1e30)
_POSITIVE = ("Softmax", "Sigmoid")
_KEEPS_SIGN = ("Cast", "Div", "TopK", "GatherElements", "Gather", "Reshape", "Squeeze", "Unsqueeze", "Identity")
_ACTIVATIONS = {"silu": (1.0, 0.0), "swiglu_limited": (None, 1.0)}


@dataclass(frozen=True)
class LowerExpertsPass(GraphPass):
    """Replace every Experts node that onnxruntime's MoE computes exactly.

    ::

        y = Experts(h, indices, weights, up, down)
        ->
        p = ScatterElements(-1e30 [T, E], indices, Log(weights))
        y = MoE(h, p, up_interleaved, down) * ReduceSum(weights)

    MoE wants the router's logits and takes softmax and top-k itself. The softmax of the logarithms of the chosen
    weights is those weights over their sum, and experts that were not chosen get exactly 0; so whatever the
    model's router does, its weights go through.

    Rules:
        1. The gating is SiLU or the limited SwiGLU; onnxruntime's CPU kernel has gate and up rows alternating,
           so halves are interleaved, tensor by tensor, when the weight is written.
        2. The weights come from a softmax or sigmoid, so they have logarithms.
        3. Otherwise the node stays, and its function body computes every expert.
    """

    name: ClassVar[str] = "lower-experts"

    def call(self, model: ir.Model) -> PassResult:
        """Lower what rules 1 and 2 allow."""
        fired = 0
        skipped: list[Reason] = []
        for node in [node for node in model.graph if is_op(node, "Experts", DSPARK)]:
            why = _why_not(node)
            if why:
                skipped.append(Reason("3", str(node.name), why))
                continue
            _lower(node)
            fired += 1
        if fired:
            import_domain(model, MICROSOFT)
            drop_unused_initializers(model.graph)
        return PassResult(fired, tuple(skipped))


def _why_not(node: ir.Node) -> str:
    activation = attribute(node, "activation", "silu")
    if activation not in _ACTIVATIONS or not attribute(node, "gated", 1):
        return f"required SiLU or limited SwiGLU with a gate, got {activation}"
    if not all(is_weight(value) for value in node.inputs[3:] if value is not None):
        return "its weights are not constant"
    if not _is_positive(node.inputs[2]):
        return "its routing weights are not plainly from a softmax or sigmoid"
    return ""


def _is_positive(value: ir.Value | None) -> bool:
    """Whether `value` is a softmax or sigmoid, seen through what cannot make it negative."""
    step = producer(value)
    while step is not None and step.op_type in _KEEPS_SIGN:
        step = producer(step.inputs[0])
    return step is not None and step.op_type in _POSITIVE


def _lower(node: ir.Node) -> None:
    hidden, indices, weights, up, down = (_required(node, index) for index in range(5))
    n_experts = tensor_dims(_tensor(up))[0]
    up_bias, down_bias = input_at(node, 5), input_at(node, 6)
    transposed = bool(attribute(node, "transposed", 0))
    halves = not attribute(node, "interleaved", 0)
    inputs = [
        hidden,
        _router_logits(node, indices, weights, n_experts),
        _derived(node, up, transposed, halves),
        None if up_bias is None else _derived(node, up_bias, False, halves),
        _derived(node, down, transposed, False),
        down_bias,
    ]
    product = insert(node, "MoE", inputs, _attributes(node, indices), domain=MICROSOFT, like=node.outputs[0])
    last = add_initializer(owner(node), "last_axis", np.array([-1]))
    total = insert(node, "ReduceSum", [weights, last], dtype=weights.dtype)
    scaled = insert(node, "Mul", [product.outputs[0], total.outputs[0]], like=node.outputs[0])
    replace_value(node.outputs[0], scaled.outputs[0])
    remove_dead([node])


def _attributes(node: ir.Node, indices: ir.Value) -> dict[str, Any]:
    k = indices.shape[-1] if indices.shape is not None else None
    if not isinstance(k, int):
        raise PassError(f"node {node.name!r}", f"required a fixed number of experts a token, got {k}")
    alpha, beta = _ACTIVATIONS[attribute(node, "activation", "silu")]
    attributes: dict[str, Any] = {"k": k, "activation_type": "swiglu", "swiglu_fusion": 1}
    attributes["activation_alpha"] = attribute(node, "alpha", 1.0) if alpha is None else alpha
    attributes["activation_beta"] = beta
    if alpha is None:
        attributes["swiglu_limit"] = attribute(node, "limit", 0.0)
    return attributes


def _router_logits(node: ir.Node, indices: ir.Value, weights: ir.Value, n_experts: int) -> ir.Value:
    """Logits [T, E] whose softmax is the weights over their sum, and 0 where an expert was not chosen."""
    graph = owner(node)
    absent = add_initializer(graph, "expert_absent", np.array(_ABSENT))
    count = add_initializer(graph, f"experts_{n_experts}", np.array([n_experts]))
    tokens = insert(node, "Shape", [indices], {"start": 0, "end": 1}, dtype=ir.DataType.INT64, shape=[1])
    shape = insert(node, "Concat", [tokens.outputs[0], count], {"axis": 0}, dtype=ir.DataType.INT64, shape=[2])
    empty = insert(node, "Expand", [absent, shape.outputs[0]], dtype=ir.DataType.FLOAT)
    logs = insert(node, "Log", [weights], like=weights)
    scattered = insert(
        node, "ScatterElements", [empty.outputs[0], indices, logs.outputs[0]], {"axis": 1}, dtype=ir.DataType.FLOAT
    )
    return scattered.outputs[0]


def _derived(node: ir.Node, value: ir.Value, transposed: bool, halves: bool) -> ir.Value:
    """The weight as MoE wants it, [E, out, in] with gate and up alternating along out; itself when it is so."""
    if not transposed and not halves:
        return value
    tensor = _tensor(value)
    dims = list(tensor_dims(tensor))
    if transposed:
        dims[1], dims[2] = dims[2], dims[1]
    change = partial(_as_moe, transposed=transposed, halves=halves)
    return add_initializer(owner(node), f"{value.name}.moe", rearranged(tensor, change, dims))


def _as_moe(array: npt.NDArray[Any], transposed: bool, halves: bool) -> npt.NDArray[Any]:
    if transposed:
        array = array.swapaxes(1, 2)
    if halves:
        gate, up = np.split(array, 2, axis=1)
        array = np.stack([gate, up], axis=2).reshape(array.shape)
    return array


def _required(node: ir.Node, index: int) -> ir.Value:
    value = input_at(node, index)
    if value is None:
        raise PassError(f"node {node.name!r}", f"Experts has no input {index}")
    return value


def _tensor(value: ir.Value) -> ir.TensorProtocol:
    if value.const_value is None:
        raise PassError(f"initializer {value.name!r}", "has no content")
    return value.const_value
