"""QkvAttention: the reference, its body in bare onnxruntime, and the native operator against one another."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from attention_by_loops import attend, rotate_half
from native_operator import run_native, session_of
from run_operator import operator_model

from dsc.kernels.contract import check_contract
from dsc.kernels.qkv_attention import QKV_ATTENTION, function_for, make_inputs, reference

EXAMPLE = QKV_ATTENTION.example
SHAPES = [EXAMPLE, {"B": 1, "Hq": 9, "Hkv": 3, "S": 6, "D": 64, "M": 200, "R": 32}]
ATTRIBUTES = {"scale": 0.2, "window": 40, "softcap": 3.0}


def case(axes, seed, sinks=False, tree=False):
    inputs = make_inputs(axes, seed)
    dropped = {name for name, kept in (("sinks", sinks), ("tree_mask", tree)) if not kept}
    attributes = ATTRIBUTES | {"heads": axes["Hq"], "kv_heads": axes["Hkv"]}
    return {name: value for name, value in inputs.items() if name not in dropped}, attributes


def run_body(inputs, attributes):
    names = [role.name for role in QKV_ATTENTION.inputs]
    outputs = [role.name for role in QKV_ATTENTION.outputs]
    proto = operator_model("QkvAttention", inputs, names, outputs, attributes, None)
    model = ir.from_proto(onnx.load_from_string(proto))
    (node,) = model.graph
    function = function_for(node)
    node.overload = function.overload
    model.functions[function.identifier()] = function
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip(outputs, session.run(None, inputs), strict=True))


def test_the_contract_holds():
    check_contract(QKV_ATTENTION)


def test_reference_agrees_with_one_query_at_a_time():
    inputs, attributes = case(EXAMPLE, 1, sinks=True, tree=True)
    heads, kv, dim = EXAMPLE["Hq"], EXAMPLE["Hkv"], EXAMPLE["D"]
    split = inputs["qkv"].reshape(EXAMPLE["B"], EXAMPLE["S"], -1, dim).transpose(0, 2, 1, 3)
    q, k = (rotate_half(x, inputs["cos"], inputs["sin"]) for x in (split[:, :heads], split[:, heads : heads + kv]))
    pools = (inputs[name] for name in ("k_pool", "v_pool", "past_lengths"))
    optional = {name: inputs[name] for name in ("sinks", "tree_mask")}
    wanted = attend(q, k, split[:, heads + kv :], *pools, **ATTRIBUTES, **optional)
    found = reference(inputs, attributes)
    flat = wanted[0].transpose(0, 2, 1, 3).reshape(EXAMPLE["B"], EXAMPLE["S"], -1)
    for name, value in zip(found, (flat, *wanted[1:]), strict=True):
        QKV_ATTENTION.assert_agrees(name, found[name], value)


@pytest.mark.parametrize("run", [run_body, lambda *given: run_native(QKV_ATTENTION, *given)], ids=["body", "native"])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("axes", SHAPES, ids=str)
def test_it_agrees_with_the_reference(axes, sinks, tree, run):
    inputs, attributes = case(axes, 3, sinks, tree)
    found = run(inputs, attributes)
    for name, value in reference(inputs, attributes).items():
        QKV_ATTENTION.assert_agrees(name, found[name], value)


def test_rows_are_the_same_bits_one_by_one_and_together():
    inputs, attributes = case(SHAPES[1], 5)
    together = run_native(QKV_ATTENTION, inputs, attributes, threads=2)
    session = session_of(QKV_ATTENTION, inputs, attributes)
    state = {name: inputs[name] for name in ("k_pool", "v_pool", "past_lengths")}
    for row in range(SHAPES[1]["S"]):
        one = {name: np.ascontiguousarray(inputs[name][:, row : row + 1]) for name in ("qkv", "cos", "sin")}
        o, k_pool, v_pool = session.run(None, one | state)
        np.testing.assert_array_equal(o[:, 0], together["o"][:, row])
        state = {"k_pool": k_pool, "v_pool": v_pool, "past_lengths": state["past_lengths"] + np.int32(1)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": np.zeros((3, 5, 241), np.float32)}, "qkv must be"),
        ({"cos": np.zeros((3, 5, 13), np.float32)}, "cos and sin must be"),
        ({"sin": np.zeros((3, 5, 8), np.float32)}, "cos and sin must be"),
        ({"past_lengths": np.array([0, 33, 0], np.int32)}, "within the pool"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_wrong_inputs_are_refused(change, message):
    inputs, attributes = case(EXAMPLE, 7)
    with pytest.raises(Exception, match=message):
        session_of(QKV_ATTENTION, inputs, attributes).run(None, inputs | change)
