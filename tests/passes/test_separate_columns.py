import numpy as np
import pytest
from pass_graphs import ops, run, text_model

from dsc.kernels.interleave import interleave_codes, interleave_factors
from dsc.passes.block_quantisation import Blocks, dequantise
from dsc.passes.lower_block_matmul import LowerBlockMatMulPass
from dsc.passes.separate_columns import SeparateColumnsPass
from dsc.passes.verify_graph import verify_graph


def build(n, mins):
    rng = np.random.default_rng(0)
    blocks = Blocks(
        4,
        rng.integers(0, 256, (n, 3, 16), dtype=np.uint8),
        rng.uniform(0.5, 1, (n, 3)).astype(np.float32),
        rng.standard_normal((n, 3)).astype(np.float32) if mins else None,
    )
    weights = {"q": interleave_codes(blocks.qweight), "s": interleave_factors(blocks.scales)}
    tiles = weights["q"].shape[0]
    if blocks.mins is not None:
        weights["m"] = interleave_factors(blocks.mins)
    declared = f", float[{tiles}, 3, 16] m" if mins else ""
    node = f"ai.dspark.InterleavedMatMul<K=96, N={n}, bits=4, block=32>"
    more = ", m" if mins else ""
    text = f"""agraph (float[batch, seq, 96] x, uint8[{tiles}, 3, 4, 16, 4] q, float[{tiles}, 3, 16] s{declared})
      => (float[batch, seq, {n}] y, float[batch, seq, {n}] z)
      {{ y = {node}(x, q, s{more}) z = {node}(x, q, s{more}) }}"""
    return text_model(text, **weights), dequantise(blocks)


@pytest.mark.parametrize("n", [5, 16, 40])
@pytest.mark.parametrize("mins", [False, True])
def test_products_are_those_of_the_rows_put_apart_once(n, mins):
    model, weight = build(n, mins)
    assert SeparateColumnsPass()(model).fired == 2
    verify_graph(model)
    names = ops(model)
    assert names.count("BlockMatMul") == 2
    assert names.count("Transpose") == (3 if mins else 2)
    assert ("Slice" in names) == (n % 16 != 0)
    LowerBlockMatMulPass()(model)
    x = np.random.default_rng(1).standard_normal((2, 3, 96)).astype(np.float32)
    found, wanted = run(model, {"x": x}), x @ weight.T
    assert np.abs(found["y"] - wanted).max() < 0.02 * np.abs(wanted).max()
    np.testing.assert_array_equal(found["y"], found["z"])
    assert not SeparateColumnsPass()(model).modified
