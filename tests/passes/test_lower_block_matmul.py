import numpy as np
import pytest
from pass_graphs import ops, run, text_model

from dsc.passes.block_quantisation import Blocks, dequantise
from dsc.passes.lower_block_matmul import LowerBlockMatMulPass
from dsc.passes.verify_graph import verify_graph


def build(bits, block, mins):
    rng = np.random.default_rng(0)
    weights = {
        "q": rng.integers(0, 256, (24, 128 // block, block * bits // 8), dtype=np.uint8),
        "s": rng.uniform(0.5, 1, (24, 128 // block)).astype(np.float32),
    }
    weights |= {"m": rng.standard_normal((24, 128 // block)).astype(np.float32)} if mins else {}
    extra = f", float[24, {128 // block}] m" if mins else ""
    values = ", m" if mins else ""
    node = f"ai.dspark.BlockMatMul<K=128, N=24, bits={bits}, block={block}>"
    text = f"""agraph (float[batch, seq, 128] x, uint8[24, {128 // block}, {block * bits // 8}] q,
      float[24, {128 // block}] s{extra}) => (float[batch, seq, 24] y, float[batch, seq, 24] z)
      {{ y = {node}(x, q, s{values}) z = {node}(x, q, s{values}) }}"""
    return text_model(text, **weights), dequantise(Blocks(bits, weights["q"], weights["s"], weights.get("m")))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("mins", [False, True])
def test_products_are_those_of_the_blocks(bits, block, mins):
    model, weight = build(bits, block, mins)
    assert LowerBlockMatMulPass()(model).fired == 2
    verify_graph(model)
    assert ops(model).count("MatMulNBits") == 2
    assert ops(model).count("ReduceSum") == (1 if mins else 0)
    rng = np.random.default_rng(1)
    for batch, seq in ((1, 1), (2, 4), (3, 1)):
        x = rng.standard_normal((batch, seq, 128)).astype(np.float32)
        wanted = x @ weight.T
        got = run(model, {"x": x})
        assert np.abs(got["y"] - wanted).max() < 0.02 * np.abs(wanted).max()
        np.testing.assert_array_equal(got["y"], got["z"])
    assert not LowerBlockMatMulPass()(model).modified
