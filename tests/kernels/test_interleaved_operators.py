"""InterleavedMatMul and InterleavedGather against the plain layout: references, bodies and native kernels."""

from __future__ import annotations

import numpy as np
import pytest
from native_operator import run_native, session_of
from run_operator import run_operator

from dsc.kernels import block_matmul
from dsc.kernels.contract import check_contract
from dsc.kernels.interleaved_gather import INTERLEAVED_GATHER
from dsc.kernels.interleaved_gather import function_body as gather_body
from dsc.kernels.interleaved_matmul import INTERLEAVED_MATMUL, interleaved
from dsc.kernels.interleaved_matmul import function_body as matmul_body

COLUMNS = [1, 9, 16, 37, 96]
variants = pytest.mark.parametrize(
    ("n", "bits", "mins"), [(n, bits, mins) for n in COLUMNS for bits in (4, 8) for mins in (False, True)]
)


def rows_of(n, bits, mins, seed=3):
    inputs = block_matmul.make_bits_inputs({"M": 5, "G": 7, "N": n}, seed, bits)
    if not mins:
        del inputs["mins"]
    return inputs, {"bits": bits, "K": 7 * 32, "N": n, "block": 32}


def gather_inputs(rows, n):
    blocks = {name: tensor for name, tensor in interleaved(rows).items() if name != "x"}
    return {"ids": np.array([[0, n - 1, n // 2], [n // 3, 0, n - 1]])} | blocks


@pytest.mark.parametrize("contract", [INTERLEAVED_MATMUL, INTERLEAVED_GATHER], ids=lambda contract: contract.name)
def test_the_contracts_hold(contract):
    check_contract(contract)


@variants
def test_a_product_is_that_of_the_rows(n, bits, mins):
    rows, attributes = rows_of(n, bits, mins)
    wanted, inputs = block_matmul.reference(rows, attributes)["y"], interleaved(rows)
    np.testing.assert_array_equal(INTERLEAVED_MATMUL.reference(inputs, attributes)["y"], wanted)
    names = [role.name for role in INTERLEAVED_MATMUL.inputs]
    body = run_operator("InterleavedMatMul", inputs, names, ["y"], attributes, matmul_body(mins))
    by_rows = run_operator("BlockMatMul", rows, names, ["y"], attributes, block_matmul.function_body(mins))
    np.testing.assert_array_equal(body["y"], by_rows["y"])


@variants
def test_gathered_rows_are_those_of_the_weight(n, bits, mins):
    rows, attributes = rows_of(n, bits, mins)
    weight = block_matmul.dequantise(rows["qweight"], rows["scales"], rows.get("mins"), bits)
    inputs = gather_inputs(rows, n)
    wanted, names = weight[inputs["ids"]], [role.name for role in INTERLEAVED_GATHER.inputs]
    np.testing.assert_array_equal(INTERLEAVED_GATHER.reference(inputs, attributes)["rows"], wanted)
    body = run_operator("InterleavedGather", inputs, names, ["rows"], attributes, gather_body(mins))["rows"]
    native = run_native(INTERLEAVED_GATHER, inputs, attributes, threads=2)["rows"]
    np.testing.assert_allclose(body, wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(native, body)


@pytest.mark.parametrize("bad", [-1, 37, 1 << 40])
def test_an_id_outside_the_table_is_refused(bad):
    rows, attributes = rows_of(37, 8, mins=True)
    inputs = gather_inputs(rows, 37)
    session = session_of(INTERLEAVED_GATHER, inputs, attributes)
    inputs["ids"][1, 1] = bad
    with pytest.raises(Exception, match=r"an id is not within 0 \.\. N - 1"):
        session.run(None, inputs)


def test_many_rows_are_gathered_by_several_threads():
    rows, attributes = rows_of(96, 8, mins=True)
    inputs = gather_inputs(rows, 96)
    inputs["ids"] = np.random.default_rng(0).integers(0, 96, (1, 500))
    weight = block_matmul.dequantise(rows["qweight"], rows["scales"], rows["mins"], 8)
    found = run_native(INTERLEAVED_GATHER, inputs, attributes, threads=2)["rows"]
    np.testing.assert_allclose(found, weight[inputs["ids"]], rtol=1e-6, atol=1e-6)
