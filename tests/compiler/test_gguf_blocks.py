from __future__ import annotations

import gguf
import numpy as np
import pytest

from dsc.compiler.gguf_blocks import block_weight, why_not_blocks
from dsc.compiler.gguf_reader import GgufTensor

EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K")
FITTED = ("Q2_K", "Q3_K", "Q6_K")
SCALE_BYTES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
SCALE_BYTES |= {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)}


def random_tensor(kind: str, n_rows: int, n_columns: int, seed: int) -> GgufTensor:
    """Random bytes with finite scales of either sign: every code, scale and minimum that a file could hold."""
    rng = np.random.default_rng(seed)
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, (n_rows, n_columns // block, size), dtype=np.uint8)
    for at in SCALE_BYTES[kind]:
        scale = rng.normal(0, 0.02, (n_rows, n_columns // block, 1)).astype(np.float16)
        data[..., at : at + 2] = scale.view(np.uint8)
    return GgufTensor("random", kind, (n_rows, n_columns), data.reshape(n_rows, -1))


def by_library(tensor: GgufTensor) -> np.ndarray:
    return gguf.dequantize(tensor.data, gguf.GGMLQuantizationType[tensor.kind])


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("shape", [(1, 256), (7, 512), (3, 1280)])
def test_types_of_32_columns_a_scale_are_carried_exactly(kind, shape):
    tensor = random_tensor(kind, *shape, seed=sum(shape))
    block, reference = block_weight(tensor), by_library(tensor)

    error = np.abs(block.dequantise() - reference).max()

    assert block.exact
    assert block.kind == kind
    assert error <= block.max_error <= 1e-6 * np.abs(reference).max()
    if block.mins is None:
        assert error == 0


@pytest.mark.parametrize("kind", FITTED)
@pytest.mark.parametrize("shape", [(1, 256), (5, 768)])
def test_types_of_16_columns_a_scale_state_what_the_fit_costs(kind, shape):
    tensor = random_tensor(kind, *shape, seed=sum(shape))
    block, reference = block_weight(tensor), by_library(tensor)

    error = np.abs(block.dequantise() - reference).max()

    assert not block.exact
    assert block.bits == 8
    assert error == pytest.approx(block.max_error, rel=1e-5)
    assert block.max_error <= np.abs(reference).max() / 120


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_weights_quantised_by_the_library(kind):
    weights = np.random.default_rng(1).normal(0, 0.05, (6, 96)).astype(np.float32)
    weights[2, :32] = 0
    quantised = gguf.quantize(weights, gguf.GGMLQuantizationType[kind])
    tensor = GgufTensor("w", kind, weights.shape, quantised)

    assert np.abs(block_weight(tensor).dequantise() - by_library(tensor)).max() <= 1e-7


@pytest.mark.parametrize("kind", EXACT + FITTED)
def test_layout_is_that_of_block_matmul(kind):
    block = block_weight(random_tensor(kind, 4, 512, seed=3))

    assert block.qweight.dtype == np.uint8
    assert block.qweight.shape == (4, 16, 16 if block.bits == 4 else 32)
    assert block.qweight.flags.c_contiguous
    assert block.scales.shape == (4, 16)
    assert block.scales.dtype == np.float32
    assert block.mins is None or (block.mins.shape == (4, 16) and block.mins.dtype == np.float32)


def test_low_nibble_holds_the_even_column():
    data = np.zeros((1, 18), np.uint8)
    data[0, :2] = np.array([1.0], np.float16).view(np.uint8)
    data[0, 2:] = 0x88
    data[0, 2] = 0x8B  # column 0 has code 11, column 16 code 8
    block = block_weight(GgufTensor("w", "Q4_0", (1, 32), data))

    assert block.qweight[0, 0, 0] == 0x8B
    assert block.dequantise()[0, 0] == 3


def test_rows_can_be_put_in_another_order():
    block = block_weight(random_tensor("Q4_1", 6, 64, seed=5))
    order = np.array([3, 0, 5, 1, 2, 4])

    assert np.array_equal(block.take_rows(order).dequantise(), block.dequantise()[order])


@pytest.mark.parametrize(
    ("kind", "shape", "reason"),
    [
        ("Q4_0", (2, 48), "48 columns"),
        ("Q4_0", (64,), "1 dimensions"),
        ("IQ2_XXS", (2, 256), "IQ2_XXS"),
        ("F16", (2, 64), "F16"),
    ],
)
def test_what_cannot_be_carried_names_its_reason(kind, shape, reason):
    tensor = GgufTensor("w", kind, shape, np.zeros(1, np.uint8))

    assert reason in why_not_blocks(tensor)
    with pytest.raises(ValueError, match=reason):
        block_weight(tensor)
