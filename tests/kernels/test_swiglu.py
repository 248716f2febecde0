"""SwiGlu: the reference, its body in bare onnxruntime, and the native operator."""

from __future__ import annotations

import numpy as np
import pytest
from native_operator import run_native, session_of
from run_operator import run_operator

from dsc.kernels.contract import check_contract
from dsc.kernels.swiglu import SWIGLU, function_body, make_inputs, reference


def body(inputs):
    return run_operator("SwiGlu", inputs, ["x"], ["y"], {}, function_body())["y"]


def native(inputs):
    return run_native(SWIGLU, inputs, {}, threads=2)["y"]


def test_the_contract_holds():
    check_contract(SWIGLU)


@pytest.mark.parametrize("run", [body, native])
@pytest.mark.parametrize("width", [1, 8, 37, 1536, 9001])
def test_it_agrees_with_the_reference(width, run):
    inputs = make_inputs({"M": 5, "W": 2 * width}, 1)
    SWIGLU.assert_agrees("y", run(inputs), reference(inputs, {})["y"])


@pytest.mark.parametrize("run", [body, native])
def test_large_gates_neither_overflow_nor_lose_the_value(run):
    x = np.array([[-1e4, -100, -30, 0, 30, 100, 1e4] + [2.0] * 7], np.float32)
    np.testing.assert_allclose(run({"x": x}), reference({"x": x}, {})["y"], rtol=1e-5, atol=1e-9)


def test_a_row_is_the_same_bits_alone_and_among_others():
    inputs = make_inputs({"M": 9, "W": 2 * 4100}, 3)
    together = native(inputs)
    for row in range(9):
        np.testing.assert_array_equal(native({"x": inputs["x"][row : row + 1]})[0], together[row])


def test_an_odd_width_is_refused():
    inputs = {"x": np.zeros((2, 7), np.float32)}
    with pytest.raises(Exception, match="even number"):
        session_of(SWIGLU, inputs, {}).run(None, inputs)
