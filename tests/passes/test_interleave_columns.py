import numpy as np
import onnx_ir as ir
import pytest
from native_operator import library
from pass_graphs import ops, run
from tied_embedding import WithMins, tied_embedding

from dsc.passes.attach_bodies import AttachBodiesPass
from dsc.passes.interleave_columns import InterleaveColumnsPass
from dsc.passes.lower_block_matmul import LowerBlockMatMulPass
from dsc.passes.quantize_embedding import QuantizeEmbeddingPass
from dsc.passes.quantize_weights import QuantizeWeightsPass
from dsc.passes.separate_columns import SeparateColumnsPass
from dsc.passes.verify_graph import verify_graph


def tied(ids="int64", **options):
    model = tied_embedding(ids)
    QuantizeWeightsPass(**options)(model)
    QuantizeEmbeddingPass()(model)
    return model


def feeds(batch, seq):
    rng = np.random.default_rng(batch)
    return {"ids": rng.integers(0, 50, (batch, seq)), "h": rng.standard_normal((batch, seq, 64)).astype(np.float32)}


@pytest.mark.parametrize("options", [{}, {"bits": 8}, {"head_bits": 4}, {"block_weights": {"w": WithMins()}}])
def test_product_and_gather_read_one_interleaved_matrix(options):
    plain, model = tied(**options), tied(**options)
    result = InterleaveColumnsPass()(model)
    verify_graph(model)
    assert result.fired == 2
    assert sorted(ops(model)) == ["InterleavedGather", "InterleavedMatMul"]
    gather, product = sorted(model.graph, key=lambda node: node.op_type)
    assert list(gather.inputs[1:]) == list(product.inputs[1:])
    assert set(model.graph.initializers) == {value.name for value in product.inputs[1:]}
    separated = model.clone()
    assert SeparateColumnsPass()(separated).fired == 2
    verify_graph(separated)
    for other in (plain, separated):
        LowerBlockMatMulPass()(other)
    AttachBodiesPass()(model)
    for batch, seq in ((1, 1), (2, 4), (3, 1)):
        given = feeds(batch, seq)
        wanted, apart = run(plain, given), run(separated, given)
        native, body = run(model, given, library=library()), run(model, given)
        for name in wanted:
            np.testing.assert_array_equal(apart[name], wanted[name])
            np.testing.assert_allclose(body[name], wanted[name], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(native["e"], wanted["e"])
        assert np.abs(native["logits"] - wanted["logits"]).max() < 0.02 * np.abs(wanted["logits"]).max()
    assert not InterleaveColumnsPass()(model).modified
    assert not SeparateColumnsPass()(separated).modified


def test_content_is_read_only_when_it_is_asked_for():
    model = tied()
    InterleaveColumnsPass()(model)
    assert all(isinstance(value.const_value, ir.LazyTensor) for value in model.graph.initializers.values())


def test_other_blocks_stay_with_the_reason():
    model = tied(block=64)
    result = InterleaveColumnsPass()(model)
    assert not result.modified
    assert "rule 1 at w.qweight: its blocks are not of 32 weights" in str(result.skipped[0])


@pytest.mark.parametrize("damage", ["reader", "ids"])
def test_a_matrix_that_something_else_reads_stays(damage):
    model = tied("int32" if damage == "ids" else "int64")
    if damage == "reader":
        qweight = model.graph.initializers["w.qweight"]
        model.graph.append(ir.node("Identity", [qweight]))
    before = ops(model)
    result = InterleaveColumnsPass()(model)
    assert "rule 2 at w.qweight: something else reads it" in str(result.skipped[0])
    assert ops(model) == before
