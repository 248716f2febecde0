from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pass_graphs import assert_same_results, ops, run, text_model

from dsc.bundle_schema.errors import PassError, RequestError
from dsc.passes.block_quantisation import Blocks, dequantise, quantise_symmetric
from dsc.passes.fold_constants import FoldConstantsPass
from dsc.passes.lower_block_matmul import LowerBlockMatMulPass
from dsc.passes.quantize_weights import QuantizeWeightsPass, head_weight
from dsc.passes.verify_graph import verify_graph

RNG = np.random.default_rng(0)
A = RNG.standard_normal((48, 64)).astype(np.float32)
HEAD = RNG.standard_normal((40, 48)).astype(np.float32)
ODD = RNG.standard_normal((64, 40)).astype(np.float32)
TEXT = """agraph (float[batch, seq, 64] x, float[48, 64] a, float[48, 64] h, float[48, 40] odd, float[48] bias)
=> (float[batch, seq, 48] logits, float[batch, seq, 40] z)
{ at = Transpose<perm=[1, 0]>(a) m = MatMul(x, at) b = Add(m, bias) z = MatMul(b, odd)
  ht = Transpose<perm=[1, 0]>(h) y = MatMul(x, ht) two = Constant<value_float=2.0>() logits = Mul(y, two) }"""
H = RNG.standard_normal((48, 64)).astype(np.float32)


def build():
    bias = RNG.standard_normal(48).astype(np.float32)
    return text_model(TEXT, a=A, h=H, odd=ODD[:48], bias=bias)


def attributes(model, op="BlockMatMul"):
    return [{k: a.value for k, a in node.attributes.items()} for node in model.graph if node.op_type == op]


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.sampled_from([4, 8]), st.sampled_from([32, 64, 128]), st.integers(1, 5))
def test_rounding_is_within_one_step_of_the_float(seed, bits, block, n):
    rows = np.random.default_rng(seed).standard_normal((n, 2 * block)).astype(np.float32)
    rows[0, :block] = 0
    blocks = quantise_symmetric(rows, bits, block)
    assert blocks.qweight.shape == (n, 2, block * bits // 8)
    step = np.repeat(np.abs(blocks.scales), block, axis=1)
    # Half a step, or a whole one for the value opposite to the largest, which has no integer of its own.
    assert (np.abs(dequantise(blocks) - rows) <= step * 1.0001).all()
    assert (dequantise(blocks)[0, :block] == 0).all()


@pytest.mark.parametrize("folded", [False, True])
def test_matrices_become_blocks_whichever_way_they_are_spelled(folded):
    model = build()
    if folded:
        FoldConstantsPass()(model)
    result = QuantizeWeightsPass()(model)
    verify_graph(model)
    assert result.fired == 2
    assert attributes(model) == [
        {"K": 64, "N": 48, "bits": 4, "block": 32},
        {"K": 64, "N": 48, "bits": 8, "block": 32},
    ]
    assert [(reason.where, reason.rule) for reason in result.skipped] == [("odd", "4")]
    assert "k = 48 is not a multiple" in result.skipped[0].why
    assert model.graph.initializers["bias"].dtype.name == "FLOAT"
    assert "a" not in model.graph.initializers
    assert "h" not in model.graph.initializers


def test_lowered_products_are_near_the_float_ones_and_rows_do_not_see_each_other():
    model = build()
    reference = build()
    for weight, bits in (("a", 4), ("h", 8)):
        value = reference.graph.initializers[weight]
        blocks = quantise_symmetric(value.const_value.numpy(), bits, 32)
        value.const_value = __import__("onnx_ir").tensor(dequantise(blocks), name=weight)
    QuantizeWeightsPass()(model)
    assert LowerBlockMatMulPass()(model).fired == 2
    reference.graph.initializers["bias"].const_value = model.graph.initializers["bias"].const_value
    verify_graph(model)
    # What is left is the rounding of activations to 8 bits.
    make = lambda batch, seq, rng: {"x": rng.standard_normal((batch, seq, 64)).astype(np.float32)}  # noqa: E731
    assert_same_results(reference, model, make, rtol=0.02, atol=1.5)
    x = RNG.standard_normal((1, 5, 64)).astype(np.float32)
    alone = run(model, {"x": x[:, :1]})["logits"][0, 0]
    x[0, 1:] *= 100
    np.testing.assert_allclose(run(model, {"x": x})["logits"][0, 0], alone, rtol=1e-5)


def test_options():
    model = build()
    result = QuantizeWeightsPass(bits=8, block=64, exclude=("^a$",), min_elements=10)(model)
    assert [reason.where for reason in result.skipped] == ["a", "odd"]
    assert attributes(model) == [{"K": 64, "N": 48, "bits": 8, "block": 64}]
    small = build()
    assert "fewer than" in str(QuantizeWeightsPass(min_elements=10**6)(small).skipped[0])
    assert "BlockMatMul" not in ops(small)
    four = build()
    QuantizeWeightsPass(head_bits=4)(four)
    assert {a["bits"] for a in attributes(four)} == {4}


def test_a_slow_combination_is_refused():
    with pytest.raises(RequestError, match="15 times slower"):
        QuantizeWeightsPass(bits=8, accuracy_level=0)


@dataclass(frozen=True)
class Carried:
    bits: int
    qweight: np.ndarray
    scales: np.ndarray
    mins: np.ndarray | None


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("with_mins", [False, True])
def test_blocks_of_the_checkpoint_are_carried_exactly(bits, with_mins):
    rng = np.random.default_rng(bits)
    qweight = rng.integers(0, 256, (48, 2, 4 * bits), dtype=np.uint8)
    scales = rng.uniform(-1, 1, (48, 2)).astype(np.float32)
    mins = rng.standard_normal((48, 2)).astype(np.float32) if with_mins else None
    model = build()
    QuantizeWeightsPass(block_weights={"a": Carried(bits, qweight, scales, mins)}, exclude=("^h$",))(model)
    verify_graph(model)
    node = next(node for node in model.graph if node.op_type == "BlockMatMul")
    assert len(node.inputs) == (4 if with_mins else 3)
    np.testing.assert_array_equal(node.inputs[1].const_value.numpy(), qweight)
    LowerBlockMatMulPass()(model)
    verify_graph(model)
    x = rng.standard_normal((2, 3, 64)).astype(np.float32)
    weight = dequantise(Blocks(bits, qweight, scales, mins))
    bias = model.graph.initializers["bias"].const_value.numpy()
    wanted = (x @ weight.T + bias) @ ODD[:48]
    got = run(model, {"x": x})["z"]
    assert np.abs(got - wanted).max() < 0.02 * np.abs(wanted).max()


def test_blocks_that_no_product_uses_or_that_do_not_fit_are_an_error():
    block = Carried(4, np.zeros((48, 2, 16), np.uint8), np.ones((48, 2), np.float32), None)
    with pytest.raises(PassError, match="no product in the graph"):
        QuantizeWeightsPass(block_weights={"missing": block})(build())
    embedding = text_model(
        "agraph (int64[batch, seq] ids, float[48, 64] e) => (float[batch, seq, 64] y) { y = Gather(e, ids) }", e=A
    )
    assert not QuantizeWeightsPass(block_weights={"e": block})(embedding).modified
    short = Carried(4, np.zeros((47, 2, 16), np.uint8), np.ones((47, 2), np.float32), None)
    with pytest.raises(PassError, match="required blocks for"):
        QuantizeWeightsPass(block_weights={"a": short})(build())


def test_dynamic_quantisation_is_refused():
    model = text_model(
        "agraph (float[4, 8] x) => (uint8[4, 8] q, float s, uint8 z) { q, s, z = DynamicQuantizeLinear(x) }"
    )
    with pytest.raises(PassError, match="a row's result depends on the others"):
        QuantizeWeightsPass()(model)


def test_the_head_is_found_through_scaling_and_softcap():
    assert head_weight(build().graph) == "h"
    assert head_weight(text_model("agraph (float[4] x) => (float[4] y) { y = Relu(x) }").graph) is None
