import numpy as np
import pytest
from pass_graphs import ops, run
from tied_embedding import WithMins, tied_embedding

from dsc.passes.block_quantisation import Blocks, dequantise
from dsc.passes.lower_block_matmul import LowerBlockMatMulPass
from dsc.passes.quantize_embedding import QuantizeEmbeddingPass
from dsc.passes.quantize_weights import QuantizeWeightsPass
from dsc.passes.verify_graph import verify_graph


@pytest.mark.parametrize("options", [{}, {"head_bits": 4}, {"block": 64}, {"block_weights": {"w": WithMins()}}])
def test_the_embedding_gathers_from_the_heads_blocks(options):
    model = tied_embedding()
    QuantizeWeightsPass(**options)(model)
    assert "w" in model.graph.initializers
    result = QuantizeEmbeddingPass()(model)
    verify_graph(model)
    assert result.fired == 1
    assert "w" not in model.graph.initializers
    gather = next(node for node in model.graph if node.op_type == "GatherBlockQuantized")
    product = next(node for node in model.graph if node.op_type == "BlockMatMul")
    assert gather.inputs[0] is product.inputs[1]
    assert gather.inputs[2].const_value.tobytes() == product.inputs[2].const_value.tobytes()
    mins = None if len(product.inputs) < 4 else product.inputs[3].const_value.numpy()
    blocks = Blocks(product.attributes["bits"].value, *(v.const_value.numpy() for v in product.inputs[1:3]), mins)
    LowerBlockMatMulPass()(model)
    for batch, seq in ((1, 1), (2, 4), (3, 1)):
        ids = np.random.default_rng(batch).integers(0, 50, (batch, seq))
        got = run(model, {"ids": ids, "h": np.ones((batch, seq, 64), np.float32)})
        np.testing.assert_allclose(got["e"], dequantise(blocks)[ids], rtol=1e-6, atol=1e-6)


def test_an_embedding_without_a_quantised_head_stays():
    model = tied_embedding()
    QuantizeWeightsPass(exclude=("w",))(model)
    result = QuantizeEmbeddingPass()(model)
    assert not result.modified
    assert "no product" in str(result.skipped[0])
    assert ops(model)[0] == "Gather"
